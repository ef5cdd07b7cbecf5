"""The order in which the arms of a comparison take turns."""

from __future__ import annotations

from random import Random

__all__ = ["random_order"]


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
