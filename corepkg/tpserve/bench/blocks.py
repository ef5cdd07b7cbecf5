"""The order in which the arms of a comparison take turns."""

from __future__ import annotations

from random import Random

__all__ = ["random_order"]


def random_order(arms: int, blocks: int, seed: int) -> list[list[int]]:
    """For each block all arms in the order in which they run; a function of the seed."""
    random = Random(seed)
    return [random.sample(range(arms), arms) for _ in range(blocks)]
