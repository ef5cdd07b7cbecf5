"""How much a program computes at a time: a table, so that nothing is tuned while a server runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Tile", "Tiles", "choose_tiles"]


@dataclass(frozen=True, slots=True)
class Tile:
    """The size of one kernel's programs.

    Attributes:
        rows: query rows, the heads of a group for one or several tokens.
        block: keys at a time.
        warps: of a program.
        stages: blocks in flight, the one computed included.
    """

    rows: int
    block: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The sizes of all kernels.

    Attributes:
        small: of decode; a multiprocessor holds four programs.
        large: of decode; it holds three.
        prefill: of prefill.
    """

    small: Tile
    large: Tile
    prefill: Tile


# By bytes of a number and columns of a head. Measured on an H200 for 64 and 128 columns of 2 bytes; the others are as
# large as fits.
_TABLE = {
    (2, 64): Tiles(Tile(16, 128, 4, 3), Tile(16, 128, 4, 3), Tile(128, 64, 4, 2)),
    (2, 128): Tiles(Tile(16, 64, 2, 3), Tile(16, 128, 4, 3), Tile(128, 64, 4, 3)),
    (2, 256): Tiles(Tile(16, 32, 4, 3), Tile(16, 32, 4, 3), Tile(64, 32, 4, 3)),
    (4, 64): Tiles(Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 128): Tiles(Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 256): Tiles(Tile(16, 16, 4, 2), Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
}

_INTERPRETED = Tiles(Tile(16, 256, 1, 1), Tile(16, 256, 1, 1), Tile(256, 256, 1, 1))
"""Triton's interpreter takes about as long for a large tile as for a small one."""

_SHARED_MEMORY = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
"""KB of shared memory that a program may have, by compute capability times ten; on all others it is 99."""


def choose_tiles(item: int, columns: int, sm: int, group: int) -> Tiles:
    """Look the sizes up.

    Args:
        item: bytes of a number.
        columns: the power of two that holds a head, at least 16.
        sm: the device's compute capability times ten; 0 for the interpreter.
        group: query heads to a KV head, which the rows hold at least.
    """
    tiles = _TABLE[item, max(columns, 64)] if sm else _INTERPRETED
    room = _SHARED_MEMORY.get(sm, 99) if sm else 227
    if room < 227:
        tiles = Tiles(tiles.small, replace(tiles.large, stages=2), tiles.prefill)
    if room < 163:
        small = replace(tiles.small, block=min(tiles.small.block, 32), stages=2)
        rows, block = max(tiles.prefill.rows // 2, 16), min(tiles.prefill.block, 32)
        tiles = Tiles(small, small, replace(tiles.prefill, rows=rows, block=block, stages=2))
    return Tiles(_hold(group, tiles.small), _hold(group, tiles.large), _hold(group, tiles.prefill))


def _hold(group: int, tile: Tile) -> Tile:
    return replace(tile, rows=max(tile.rows, 1 << (group - 1).bit_length()))
