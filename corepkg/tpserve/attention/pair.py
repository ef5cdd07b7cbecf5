"""Two attention backends as one: each computes the sequences that it is better at."""

from __future__ import annotations

from itertools import accumulate, chain
from typing import NamedTuple

import torch

from tpserve.api import Attention, AttentionBatch, AttentionShape, NoOptions

__all__ = ["PairedAttention"]


class _Part(NamedTuple):
    """The query rows that one of the two computes; None: all."""

    attention: Attention
    rows: slice | torch.Tensor | None


class PairedAttention(Attention):
    """One backend for sequences with one new token, and one for all others.

    Args:
        shape: what both compute.
        prefill: for sequences with several new tokens.
        decode: for those with one; CUDA graphs record it alone.
    """

    def __init__(self, shape: AttentionShape, prefill: Attention, decode: Attention) -> None:
        super().__init__(NoOptions(), shape)
        self._prefill = prefill
        self._decode = decode
        self._parts: list[_Part] = []

    def plan(self, batch: AttentionBatch) -> None:
        """Plan each of the two for its sequences."""
        singles = [i for i, length in enumerate(batch.query_lens) if length == 1]
        others = [i for i, length in enumerate(batch.query_lens) if length > 1]
        self._parts = [
            self._plan_part(attention, batch, members)
            for attention, members in ((self._prefill, others), (self._decode, singles))
            if members
        ]

    def capture(self, batch: AttentionBatch) -> None:
        """Decode's."""
        self._decode.capture(batch)
        self._parts = [_Part(self._decode, None)]

    def replay(self, batch: AttentionBatch) -> None:
        """Decode's."""
        self._decode.replay(batch)

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend, part by part."""
        if len(self._parts) == 1:
            return self._parts[0].attention.run(query, k_cache, v_cache)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for attention, rows in self._parts:
            out[rows] = attention.run(query[rows], k_cache, v_cache)
        return out

    def _plan_part(self, attention: Attention, batch: AttentionBatch, members: list[int]) -> _Part:
        if len(members) == len(batch.slots):
            attention.plan(batch)
            return _Part(attention, None)
        query_lens = [batch.query_lens[i] for i in members]
        starts = [0, *accumulate(batch.query_lens)]
        stretch = range(starts[members[0]], starts[members[-1] + 1])
        side_by_side = len(stretch) == sum(query_lens)
        rows = [] if side_by_side else list(chain.from_iterable(range(starts[i], starts[i + 1]) for i in members))
        chosen, query_starts, rows_there = torch.split(
            _upload([*members, 0, *accumulate(query_lens), *rows], batch.slots_tensor.device),
            [len(members), len(members) + 1, len(rows)],
        )
        attention.plan(
            AttentionBatch(
                query_lens=query_lens,
                kv_lens=[batch.kv_lens[i] for i in members],
                page_table=batch.page_table,
                slots=[batch.slots[i] for i in members],
                slots_tensor=batch.slots_tensor[chosen],
                kv_lens_tensor=batch.kv_lens_tensor[chosen],
                query_starts=query_starts.int(),
            )
        )
        return _Part(attention, slice(stretch.start, stretch.stop) if side_by_side else rows_there)


def _upload(numbers: list[int], device: torch.device) -> torch.Tensor:
    """int64 on the device, without waiting for it."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)
