"""Drives an engine without a scheduler: a fixed set of prompts, each in a slot of its own."""

from __future__ import annotations

from collections.abc import Sequence as Many
from random import Random

from tpserve.messages import SamplingParams
from tpserve.step import Engine, PageWrite, Sequence, SlotParams, Step, TokenWrite

__all__ = ["generate"]


def generate(
    engine: Engine,
    prompts: Many[Many[int]],
    count: int,
    params: Many[SamplingParams] | None = None,
    *,
    chunk: int = 1 << 30,
    shuffle: int | None = None,
) -> list[list[int]]:
    """Continue all prompts at once by ``count`` tokens each.

    A prompt is computed ``chunk`` tokens a step, so prompts of different lengths make steps that mix both.

    Args:
        engine: with a slot for each prompt and pages for all of them.
        prompts: token ids.
        count: tokens to draw for each.
        params: how to draw them; greedy if None.
        chunk: most prompt tokens of one sequence in one step.
        shuffle: seed that gives out pages and slots in a random order; None: in rising order.

    Returns:
        The tokens drawn for each prompt.
    """
    limits = engine.limits
    pages, slots = list(range(limits.pages)), list(range(limits.slots))
    if shuffle is not None:
        Random(shuffle).shuffle(pages)
        Random(shuffle).shuffle(slots)
    texts = [list(prompt) for prompt in prompts]
    lengths = [len(prompt) + count for prompt in prompts]
    params = params or [SamplingParams(temperature=0.0)] * len(prompts)
    writes = Step(
        sequences=[],
        tokens=[TokenWrite(slot, 0, text) for slot, text in zip(slots, texts, strict=False)],
        pages=[
            PageWrite(slot, 0, _take(pages, -(-n // limits.page_size))) for slot, n in zip(slots, lengths, strict=False)
        ],
        params=[_slot_params(slot, each) for slot, each in zip(slots, params, strict=False)],
    )
    computed = [0] * len(prompts)
    while pending := [i for i, text in enumerate(texts) if len(text) < lengths[i]]:
        ends = [min(computed[i] + chunk, len(texts[i])) for i in pending]
        sequences = [
            Sequence(slots[i], computed[i], end, sample=end == len(texts[i]))
            for i, end in zip(pending, ends, strict=True)
        ]
        step = Step(sequences, writes.tokens, writes.pages, writes.params)
        writes = Step([])
        drawn = iter(engine.launch(step).tokens())
        for i, end in zip(pending, ends, strict=True):
            computed[i] = end
            if end == len(texts[i]):
                texts[i].append(next(drawn))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _take(pages: list[int], count: int) -> list[int]:
    taken = pages[:count]
    del pages[:count]
    return taken


def _slot_params(slot: int, params: SamplingParams) -> SlotParams:
    return SlotParams(
        slot=slot,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed or 0,
    )
