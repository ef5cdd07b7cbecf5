"""The blocks of a comparison: the order in which arms take turns, and how many were whole when it was cut short."""

from __future__ import annotations

import signal
from random import Random

import msgspec

__all__ = ["CutShort", "random_order", "signal_of"]


class CutShort(msgspec.Struct, frozen=True):
    """A signal ended a comparison before its time; there is at least one whole block.

    Attributes:
        blocks: those in which every arm ran.
        signal: its number.
    """

    blocks: int
    signal: int

    def say(self, planned: int) -> str:
        """In words, of so many blocks."""
        return f"cut short by {signal.Signals(self.signal).name}; whole blocks: {self.blocks} of {planned}"


def signal_of(stop: KeyboardInterrupt) -> int:
    """Which signal interrupted: the argument, or else that of a Ctrl-C."""
    return int(stop.args[0] if stop.args else signal.SIGINT)


def random_order(arms: int, blocks: int, seed: int) -> list[list[int]]:
    """For each block all arms in the order in which they run; a function of the seed.

    Every second block runs in the opposite order to the one before: no arm is the first more often than others.
    """
    random = Random(seed)
    orders: list[list[int]] = []
    while len(orders) < blocks:
        drawn = random.sample(range(arms), arms)
        orders += [drawn, drawn[::-1]]
    return orders[:blocks]
