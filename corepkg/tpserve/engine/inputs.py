"""A step as tensors: what each token is, where it stands and where its key and value go."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from tpserve.api import AttentionBatch, SamplingBatch
from tpserve.engine.state import DeviceState, upload
from tpserve.step import Step

__all__ = ["Draws", "StepInputs", "make_inputs"]


@dataclass(frozen=True, slots=True)
class Draws:
    """The tokens that a step draws.

    Attributes:
        rows: int64 ``[n]``: the hidden states to draw from; None: all.
        slots: int64 ``[n]``: the row of the token pool that each goes to.
        ends: int64 ``[n]``: and the position.
        sampling: how to draw them.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    ends: torch.Tensor
    sampling: SamplingBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the decoder computes in one step.

    Attributes:
        tokens: int32 ``[t]``.
        positions: int64 ``[t]``.
        cache_slots: int64 ``[t]``: page * page_size + offset.
        attention: the batch for the attention backend.
        draws: the tokens to draw; None where no prompt ends in this step.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    cache_slots: torch.Tensor
    attention: AttentionBatch
    draws: Draws | None


def make_inputs(step: Step, state: DeviceState, page_size: int) -> StepInputs:
    """Gather a step's inputs from the device's state, to which the step's writes have been applied."""
    sequences = step.sequences
    slots_list = [each.slot for each in sequences]
    query_lens = [each.end - each.start for each in sequences]
    kv_lens = [each.end for each in sequences]
    sampled = [i for i, each in enumerate(sequences) if each.sample]
    bounds = [0, *accumulate(query_lens)]
    slots, starts, ends, query_starts, rows, drawn = upload(
        state.device,
        slots_list,
        (each.start for each in sequences),
        kv_lens,
        bounds,
        (bounds[i + 1] - 1 for i in sampled),
        sampled,
    )
    token_slots, positions = slots, starts
    if bounds[-1] > len(sequences):
        lengths = query_starts.diff()
        token_slots = slots.repeat_interleave(lengths, output_size=bounds[-1])
        offsets = (starts - query_starts[:-1]).repeat_interleave(lengths, output_size=bounds[-1])
        positions = offsets + torch.arange(bounds[-1], device=offsets.device)
    pages = state.pages[token_slots, positions // page_size].long()
    attention = AttentionBatch(
        query_lens=query_lens,
        kv_lens=kv_lens,
        page_table=state.pages,
        slots=slots_list,
        slots_tensor=slots,
        kv_lens_tensor=ends.int(),
        query_starts=query_starts.int(),
    )
    if len(sampled) < len(sequences):
        slots_list, slots, ends = [slots_list[i] for i in sampled], slots[drawn], ends[drawn]
    draws = Draws(
        rows=None if len(sampled) == bounds[-1] else rows,
        slots=slots,
        ends=ends,
        sampling=state.sampling(
            slots, ends, all_greedy=state.is_greedy(slots_list), any_filter=state.is_filtered(slots_list)
        ),
    )
    return StepInputs(
        tokens=state.tokens[token_slots, positions],
        positions=positions,
        cache_slots=pages * page_size + positions % page_size,
        attention=attention,
        draws=draws if sampled else None,
    )
