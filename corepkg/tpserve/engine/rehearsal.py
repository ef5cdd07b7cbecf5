"""What happens on a GPU before the KV pool is made: all kinds of step are computed once, on a small pool.

So kernels are compiled before the server is ready, and the memory that steps and CUDA graphs take is known when the
pool is given the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tpserve.engine.engine import ModelEngine
from tpserve.engine.graphs import GraphRecorder
from tpserve.step import EngineLimits, PageWrite, SlotParams, Step, TokenWrite
from tpserve.step import Sequence as Stretch

__all__ = ["rehearsal", "rehearse", "rehearsal_pages"]

FEW = (1, 2, 17, 33, 65, 193)
"""Tokens of steps for which there may be other kernels than for many."""

ROUNDS = 3 + len(FEW)
"""Tokens that a row of a rehearsal draws, at the most."""

GRAPH_BYTES = 4 << 20
"""What another graph takes that finds its tensors' memory in the shared pool: a description of each kernel."""


def rehearsal_pages(limits: EngineLimits, tokens: int) -> int:
    """Pages that :func:`rehearsal` needs, for steps of at most ``tokens`` tokens."""
    rows, length = _rows(limits, tokens)
    return rows * _pages(limits, length)


def rehearsal(limits: EngineLimits, tokens: int) -> list[Step]:
    """The largest step there can be; one that mixes prompts and decoding; decoding of many rows; few tokens."""
    rows, length = _rows(limits, tokens)
    each = _pages(limits, length)
    texts = [TokenWrite(row, 0, [0] * length) for row in range(rows)]
    pages = [PageWrite(row, 0, list(range(row * each, row * each + each))) for row in range(rows)]
    greedy, drawing, filtering = (
        [SlotParams(row, *how, seed=row) for row in range(rows)]
        for how in ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 50, 0.9, 0.01))
    )
    known = [length] * rows

    def decode(chosen: range) -> list[Stretch]:
        for row in chosen:
            known[row] += 1
        return [Stretch(row, known[row] - 1, known[row], sample=True) for row in chosen]

    def compute(few: int) -> Step:
        if few <= rows:
            return Step(decode(range(few)))
        again = [min(length, few - start) for start in range(0, few, length)]
        return Step(
            [Stretch(row, 0, count, sample=True) for row, count in enumerate(again)],
            [TokenWrite(row, 0, [0] * count) for row, count in enumerate(again)],
            pages[: len(again)],
            drawing[: len(again)],
        )

    prompts = [Stretch(row, 0, length, sample=True) for row in range(rows)]
    half = rows // 2
    return [
        Step(prompts, texts, pages, greedy),
        Step([*decode(range(half)), *prompts[half:]], texts[half:], pages[half:], drawing),
        Step(decode(range(rows)), params=filtering),
        *[compute(few) for few in FEW if few <= rows * length],
    ]


def rehearse(make: Callable[[], ModelEngine], steps: Sequence[Step], sizes: Sequence[int], device: str) -> int:
    """Compute steps, record the largest CUDA graph, and forget both.

    Args:
        make: makes an engine with a small pool.
        steps: what it computes.
        sizes: the batch sizes that will be recorded, rising; may be empty.
        device: the CUDA device.

    Returns:
        The bytes that steps and graphs need beside weights and pool.
    """
    engine = make()
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_reserved(device)
    for step in steps:
        engine.launch(step).tokens()
    needed = torch.cuda.max_memory_reserved(device) - held
    if sizes:
        before = _free(device)
        engine.record(sizes[-1:], GraphRecorder(device))
        needed += before - _free(device) + (len(sizes) - 1) * GRAPH_BYTES
    del engine
    torch.cuda.empty_cache()
    return needed


def _free(device: str) -> int:
    """Free memory of the device, when torch keeps none that is not in use."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _rows(limits: EngineLimits, tokens: int) -> tuple[int, int]:
    """How many prompts of which length make a step of about ``tokens`` tokens."""
    rows = min(limits.slots, tokens)
    return rows, max(1, min(tokens // rows, limits.max_context - ROUNDS))


def _pages(limits: EngineLimits, length: int) -> int:
    return -(-(length + ROUNDS) // limits.page_size)
