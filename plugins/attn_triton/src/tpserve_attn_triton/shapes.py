"""How a weight is multiplied: rules by its shape, so that nothing is tuned while a server runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WIDE_ROWS", "Block", "Blocks", "choose_blocks", "choose_parts", "choose_wide", "prefers_light"]

WIDE_ROWS = (32, 64, 128)
"""Rows of ``x`` that kernels of ``wide`` are compiled for, rising."""


@dataclass(frozen=True, slots=True)
class Block:
    """The size of one kernel's programs.

    Attributes:
        rows: of the weight.
        columns: of the weight at a time; in ``narrow``, in each of as many parts as there are warps.
        warps: of a program.
        stages: blocks in flight, the one multiplied included; of ``narrow`` and ``wide``.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Blocks:
    """The sizes for one weight.

    Attributes:
        one: of ``matvec``.
        few: of ``narrow``; None where torch's product is as fast.
    """

    one: Block
    few: Block | None


def choose_blocks(out: int, columns: int) -> Blocks:
    """The blocks for a weight ``[out, columns]``."""
    if out > _LARGE:
        return Blocks(Block(4, 1024, 4), None)
    small = out < 6144 and columns < 4096
    few = Block(8 if small else 16, 128 if columns >= 512 else 16, 4, 3)
    one = Block(2, 1024, 4) if out <= 2048 else Block(4, 512, 4)
    return Blocks(_MEASURED.get((out, columns), one), few)


def choose_wide(out: int, columns: int, rows: int, *, gated: bool) -> Block | None:
    """The block of ``wide`` for a weight ``[out, columns]`` and one of ``WIDE_ROWS``; None where torch's is as fast."""
    if out > _LARGE or out * columns < _FILLING:
        return None
    if rows > 64:
        return _WIDEST.get((out, columns)) if gated else None
    if gated:
        return Block(128, 128, 4, 4)
    if rows > WIDE_ROWS[0] and out < 6144:
        return None
    return Block(64, 128, 4, 6 if rows <= WIDE_ROWS[0] else 5)


def choose_parts(out: int, columns: int, rows: int) -> int:
    """In how many parts torch multiplies so many rows and a weight ``[out, columns]``, if what follows adds them up.

    There are too few tiles of the result for all multiprocessors. The libraries divide a sum too, but their parts are
    float32 and are added by a kernel of their own.
    """
    if out >= 6144 or out * columns < _FILLING or out % 16 or columns % 16:
        return 2 if rows in _HALVED.get((out, columns), ()) else 1
    return 2 if rows in _IN_PARTS else 1


def prefers_light(out: int, columns: int, rows: int) -> bool:
    """Whether cublasLt is faster than cuBLAS with so many rows and a weight ``[out, columns]``."""
    return rows in _LIGHT.get((out, columns), ())


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

_IN_PARTS = range(65, 385)
"""Rows for which products of weights with few rows are faster in parts."""

# Measured alone, for the shapes of Llama-3.1-8B: with more rows torch's default is better, or as good.
_LIGHT = {(4096, 4096): range(33, 257), (4096, 14_336): range(33, 113)}
_HALVED = {(6144, 4096): range(161, 233)}
_WIDEST = {(28_672, 4096): Block(256, 64, 8, 4)}
