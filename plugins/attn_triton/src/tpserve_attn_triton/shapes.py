"""How much of a weight a program multiplies: a rule by its shape, so that nothing is tuned while a server runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Block", "Blocks", "choose_blocks"]


@dataclass(frozen=True, slots=True)
class Block:
    """The size of one kernel's programs.

    Attributes:
        rows: of the weight.
        columns: of the weight at a time; in ``narrow``, in each of as many parts as there are warps.
        warps: of a program.
        stages: blocks in flight, the one multiplied included; of ``narrow``.
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
        few: of ``narrow``.
    """

    one: Block
    few: Block


def choose_blocks(out: int, columns: int) -> Blocks:
    """The blocks for a weight ``[out, columns]``."""
    if columns < 1024:
        return Blocks(Block(8, 256, 4), Block(16, 32, 2, 4))
    small = out * columns < 1 << 23
    return Blocks(Block(4 if small else 8, 1024, 4), Block(8 if small else 16, 64, 4, 4))
