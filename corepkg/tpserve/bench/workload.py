"""The prompts that benchmarks send: token ids drawn from a seed, so that every engine gets the same."""

from __future__ import annotations

from random import Random

import msgspec

__all__ = ["Workload", "fixed", "mixed", "shared_prefix"]


class Workload(msgspec.Struct, frozen=True):
    """What an engine is asked, all at once.

    Attributes:
        prompts: token ids.
        outputs: how many tokens to generate for each, past the end of text.
        temperature: 0 is greedy.
    """

    prompts: list[list[int]]
    outputs: list[int]
    temperature: float = 0.0


def fixed(streams: int, tokens: int, seed: int = 0, vocab_size: int = 40000) -> list[list[int]]:
    """Prompts of one length.

    Args:
        streams: how many.
        tokens: ids in each.
        seed: another seed gives prompts that share no prefix with these.
        vocab_size: ids lie in 100 … ``vocab_size``, above the special ones; in its upper half, if there are so few.
    """
    random = Random(seed)
    least = min(100, vocab_size // 2)
    return [[random.randint(least, vocab_size) for _ in range(tokens)] for _ in range(streams)]


def mixed(requests: int, seed: int = 0) -> Workload:
    """The workload of nano-vllm's and mini-sglang's own offline benchmarks: lengths uniform in 100 … 1024, in and out.

    Ids stay below 200, so that any vocabulary has them. Seed 0 gives the very draws of those benchmarks.
    """
    random = Random(seed)
    prompts = [[random.randint(0, 200) for _ in range(random.randint(100, 1024))] for _ in range(requests)]
    return Workload(prompts, [random.randint(100, 1024) for _ in range(requests)], temperature=0.6)


def shared_prefix(
    requests: int, groups: int, shared: int, own: int, output: int, seed: int = 0, vocab_size: int = 40000
) -> Workload:
    """Groups of prompts that begin alike, in an order in which the groups take turns.

    Args:
        requests: how many prompts there are.
        groups: how many beginnings there are; fewer if some group would have a single prompt, which shares nothing.
        shared: tokens of a beginning.
        own: tokens of each prompt behind it.
        output: tokens to generate.
        seed: another seed gives prompts that share no prefix with these.
        vocab_size: as for :func:`fixed`.
    """
    groups = max(1, min(groups, requests // 2))
    beginnings = fixed(groups, shared, seed, vocab_size)
    endings = fixed(requests, own, seed + 1_000_003, vocab_size)
    prompts = [beginnings[index % groups] + ending for index, ending in enumerate(endings)]
    return Workload(prompts, [output] * len(prompts))
