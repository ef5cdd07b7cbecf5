"""The prompts that benchmarks send: token ids drawn from a seed, so that every engine gets the same."""

from __future__ import annotations

from random import Random

__all__ = ["fixed"]


def fixed(streams: int, tokens: int, seed: int = 0, vocab_size: int = 40000) -> list[list[int]]:
    """Prompts of one length.

    Args:
        streams: how many.
        tokens: ids in each.
        seed: another seed gives prompts that share no prefix with these.
        vocab_size: ids lie in 100 … ``vocab_size``, above the special ones.
    """
    random = Random(seed)
    return [[random.randint(100, vocab_size) for _ in range(tokens)] for _ in range(streams)]
