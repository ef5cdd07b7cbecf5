"""The ``cpu`` attention: a compiled kernel reads the cache of sequences with one new token where it lies.

Sequences with several new tokens are computed as the reference does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tpserve.api import AttentionBatch, AttentionShape, Options
from tpserve.attention.reference import TorchAttention
from tpserve.native.library import Decode, load_kernels

__all__ = ["CpuAttention"]


class CpuAttention(TorchAttention):
    """The reference with a compiled kernel for decoding.

    A decoding sequence's result has the same bits alone, in any batch, and with any number of threads.
    """

    def __init__(self, options: Options, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self._kernel = load_kernels(shape.dtype).decode

    def plan_singles(self, batch: AttentionBatch, indices: list[int]) -> _DecodePart:
        """Point at the sequences' lengths and pages."""
        slots, lengths = batch.slots_tensor, batch.kv_lens_tensor
        if len(indices) < len(batch.slots):
            chosen = torch.tensor(indices)
            slots, lengths = slots[chosen], lengths[chosen]
        call = Decode(
            page_table=batch.page_table.data_ptr(),
            max_pages=batch.page_table.stride(0),
            slots=slots.data_ptr(),
            lengths=lengths.data_ptr(),
            sequences=len(indices),
            q_heads=self.shape.q_heads,
            kv_heads=self.shape.kv_heads,
            size=self.shape.head_dim,
            page_size=self.shape.page_size,
            window=self.shape.sliding_window,
            scale=self.shape.scale,
            soft_cap=self.shape.soft_cap,
        )
        return _DecodePart(self._kernel, call, (batch.page_table, slots, lengths))


@dataclass(frozen=True, slots=True)
class _DecodePart:
    """Sequences with one new token each.

    Attributes:
        kernel: computes them.
        call: its argument, but for a layer's tensors.
        held: what the argument points at.
    """

    kernel: Callable[..., None]
    call: Decode
    held: tuple[torch.Tensor, ...]

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        call, out = self.call, query.new_empty(query.shape)
        call.queries, call.stride, call.out = query.data_ptr(), query.stride(0), out.data_ptr()
        call.keys, call.values = k_cache.data_ptr(), v_cache.data_ptr()
        self.kernel(ctypes.byref(call), torch.get_num_threads())
        return out
