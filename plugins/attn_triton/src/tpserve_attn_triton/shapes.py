"""How a weight is multiplied: rules by its shape, so that nothing is tuned while a server runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WIDE_ROWS", "Block", "Blocks", "choose_blocks", "choose_parts", "choose_wide", "is_turned"]

WIDE_ROWS = (16, 32, 64, 128)
"""Rows of ``x`` that kernels of ``wide`` are compiled for, rising."""


@dataclass(frozen=True, slots=True)
class Block:
    """The size of one kernel's programs.

    Attributes:
        rows: of the weight.
        columns: of the weight at a time; in ``narrow``, in each of as many parts as there are warps.
        warps: of a program.
        stages: blocks in flight, the one multiplied included; of ``narrow`` and ``wide``.
        parts: in how many the columns are divided; of ``wide``.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Blocks:
    """The sizes for one weight.

    Attributes:
        one: of ``matvec``.
        few: of ``narrow``; None where torch's product is as fast.
    """

    one: Block
    few: Block | None


def is_turned(out: int, columns: int) -> bool:
    """Whether a weight ``[out, columns]`` is kept as ``[columns, out]``.

    Libraries multiply 65 to 320 rows with it sooner so, and ``wide`` a few; a prompt of some thousand tokens takes
    longer, and one row, which ``matvec`` cannot multiply then.
    """
    return (out, columns) in _TURNED


def choose_blocks(out: int, columns: int) -> Blocks:
    """The blocks for a weight ``[out, columns]``."""
    if out > _LARGE:
        return Blocks(Block(4, 1024, 4), None)
    small = out < 6144 and columns < 4096
    few = Block(8 if small else 16, 128 if columns >= 512 else 16, 4, 3)
    one = Block(2, 1024, 4) if out <= 2048 else Block(4, 512, 4)
    return Blocks(_MEASURED.get((out, columns), one), few)


def choose_wide(
    out: int, columns: int, rows: int, *, gated: bool = False, in_parts: bool = False, turned: bool = False
) -> Block | None:
    """The block of ``wide`` for a weight ``[out, columns]`` and one of ``WIDE_ROWS``; None where another is as fast.

    Args:
        in_parts: there may be several.
        turned: the weight is.
    """
    if out > _LARGE or out * columns < _FILLING or (rows > 64 and not (gated and turned)):
        return None
    if gated:
        return Block(256, 64, 8, 4) if turned else Block(128, 128, 4, 4)
    if in_parts:
        high = 128 if turned or 2 * -(-out // 64) > _PROGRAMS else 64
        parts = max(1, min(_PARTS, _PROGRAMS // -(-out // high)))
        return Block(high, 64, 8, 4, parts) if turned else Block(high, 128, 4, 6 if high == 64 else 4, parts)
    if rows != 32 and out < 6144:
        return None
    return Block(64, 128, 4, 6 if rows <= 32 else 5)


def choose_parts(out: int, columns: int, rows: int) -> int:
    """In how many parts torch multiplies so many rows and a weight ``[out, columns]``, if what follows adds them up.

    There are too few tiles of the result for all multiprocessors. The libraries divide a sum too, but their parts are
    float32 and are added by a kernel of their own.
    """
    if out >= 6144 or out * columns < _FILLING or out % 16 or columns % 16:
        return 2 if rows in _HALVED.get((out, columns), ()) else 1
    return 2 if rows in _IN_PARTS else 1


# In a chain of the steps of layers, on an H200, for the shapes of Qwen3-0.6B and Llama-3.1-8B; where the rule does as
# well, nothing is written down.
_MEASURED = {
    (4096, 1024): Block(4, 1024, 4),
    (1024, 2048): Block(2, 2048, 4),
    (6144, 4096): Block(4, 1024, 4),
}

_LARGE = 1 << 16
"""Rows of a weight that are a vocabulary's."""

_FILLING = 1 << 24
"""Numbers of a weight whose tiles keep all multiprocessors reading."""

_PROGRAMS = 132
"""Programs of ``wide`` that an H100 or H200 runs at a time."""

_PARTS = 4
"""Parts of ``wide``, at the most."""

_IN_PARTS = range(65, 385)
"""Rows for which torch's products with weights of few rows are faster in parts."""

# Measured alone, for the shapes of Llama-3.1-8B.
_HALVED = {(6144, 4096): range(161, 233)}
_TURNED = {(28_672, 4096), (4096, 14_336)}  # the copy engine could not read rows that are no multiple of 8
