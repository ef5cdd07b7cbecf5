"""The attention backend: FlashInfer's wrappers, planned once a step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import flashinfer
import torch
from flashinfer.jit import gen_batch_prefill_module

from tpserve.api import Attention, AttentionBatch, AttentionShape, Options
from tpserve_attn_flashinfer.compiling import compile_modules
from tpserve_attn_flashinfer.layout import gather_pages, lay_out, layout_size, parts_of, workspace_bytes

__all__ = ["FlashInferAttention"]

_KERNELS = "fa2"
"""FlashInfer's tensor-core kernels that compute decode and prefill alike: one module to compile. Those for Hopper alone
(fa3) take four times as long to compile and are slower in decode."""

_NUMBERS = 8 << 20
_DECODE_NUMBERS = 1 << 18
"""Bytes of a plan."""

_NO_ROTATION = 0


class FlashInferAttention(Attention):
    """FlashInfer's paged attention: one launch a layer, whatever is in a batch.

    All wrappers share what a plan fills on the device, which copies overwrite in the order of the stream.
    """

    def __init__(self, options: Options, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        device = torch.device(shape.device)
        self._on_cuda = device.type == "cuda"
        processors = torch.cuda.get_device_properties(device).multi_processor_count if self._on_cuda else 1
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        cells = shape.max_running * -(-shape.max_context // shape.page_size)
        # FlashInfer wants zeros there to begin with.
        self._workspace = torch.zeros(workspace_bytes(shape, processors), dtype=torch.uint8, device=device)
        self._numbers = torch.empty(_NUMBERS, dtype=torch.uint8, device=device)
        self._layout = torch.empty(layout_size(shape.max_running), dtype=torch.int32, device=device)
        self._places = torch.arange(cells, dtype=torch.int32, device=device)
        self._pages = torch.empty(cells, dtype=torch.int32, device=device)
        self._graphs: dict[int, _Turns] = {}
        # Any: flashinfer has no types.
        self._recorded: Any = None
        self._planned: Any = None
        _compile(shape, self._dtype)
        self._steps = _Turns(self._make_wrapper, on_cuda=self._on_cuda)
        self._warm_up()

    def plan(self, batch: AttentionBatch) -> None:
        """Plan a step of any kind."""
        layout = self._lay_out(batch)
        starts, last_lens, _ = parts_of(layout)
        count = int(starts[-1])
        gather_pages(self._layout[: len(layout)], batch.page_table, self._places[:count], self._pages[:count])
        query_starts = torch.tensor([0, *accumulate(batch.query_lens)], dtype=torch.int32, pin_memory=self._on_cuda)
        self._planned = self._steps.plan(
            lambda wrapper: wrapper.plan(
                query_starts, starts, self._pages[:count], last_lens, *self._sizes(), causal=True, **self._formula()
            )
        )

    def replay(self, batch: AttentionBatch) -> None:
        """Plan decode with the lengths of the host, into what the graph reads."""
        layout = self._lay_out(batch)
        starts, last_lens, _ = parts_of(layout)
        count = len(batch.slots)
        if count not in self._graphs:
            self._graphs[count] = self._make_graph(layout)
        # wrapper.plan, as for other steps, copies all of this once more and takes ten times as long on the host.
        self._recorded = self._graphs[count].plan(
            lambda wrapper: flashinfer.fast_decode_plan(
                wrapper,
                starts,
                self._pages[:0],
                last_lens,
                *self._sizes(),
                global_override_indptr_cpu=starts,
                **self._formula(),
            )
        )

    def capture(self, batch: AttentionBatch) -> None:
        """Look the pages up; the rest of the plan is in place."""
        count = len(batch.slots)
        places = count * batch.page_table.shape[1]
        layout = self._layout[: layout_size(count)]
        gather_pages(layout, batch.page_table, self._places[:places], self._pages[:places])
        self._planned = self._recorded

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._planned.run(query, (k_cache, v_cache), out=out)
        return out

    def _lay_out(self, batch: AttentionBatch) -> torch.Tensor:
        """The batch's layout on the host; a copy of it is on its way to the device."""
        columns = batch.page_table.shape[1]
        layout = lay_out(batch.kv_lens, batch.slots, self.shape.page_size, columns, pin=self._on_cuda)
        self._layout[: len(layout)].copy_(layout, non_blocking=True)
        return layout

    def _sizes(self) -> tuple[int, int, int, int]:
        shape = self.shape
        return shape.q_heads, shape.kv_heads, shape.head_dim, shape.page_size

    def _formula(self) -> dict[str, Any]:
        return {
            "sm_scale": self.shape.scale,
            "window_left": self.shape.sliding_window - 1,
            "logits_soft_cap": self.shape.soft_cap,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }

    def _make_wrapper(self) -> Any:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, backend=_KERNELS)
        wrapper.reset_workspace_buffer(self._workspace, self._numbers)
        return wrapper

    def _make_graph(self, layout: torch.Tensor) -> _Turns:
        """Wrappers for one number of sequences, planned for the first time."""
        starts, last_lens, _ = parts_of(layout)
        starts_there, last_lens_there, _ = parts_of(self._layout[: len(layout)])

        def make() -> Any:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=starts_there,
                paged_kv_indices_buffer=self._pages,
                paged_kv_last_page_len_buffer=last_lens_there,
                backend=_KERNELS,
            )
            wrapper.reset_workspace_buffer(self._workspace, self._numbers[:_DECODE_NUMBERS])
            wrapper.plan(starts, self._pages[: int(starts[-1])], last_lens, *self._sizes(), **self._formula())
            return wrapper

        return _Turns(make, on_cuda=self._on_cuda)

    def _warm_up(self) -> None:
        """Have FlashInfer load its kernels, and make what it makes when it is first called."""
        shape, device = self.shape, self._layout.device
        cell = torch.zeros(1, shape.page_size, shape.kv_heads, shape.head_dim, dtype=self._dtype, device=device)
        one = torch.ones(1, dtype=torch.int32, device=device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        starts = torch.arange(2, dtype=torch.int32, device=device)
        batch = AttentionBatch([1], [1], table, [0], one.long() - 1, one, starts)
        self.plan(batch)
        self.run(cell.new_zeros(1, shape.q_heads, shape.head_dim), cell, cell)


class _Turns:
    """Two wrappers that are planned in turn.

    A plan is copied from memory of the wrapper's own, and that copy may wait for the step before: the memory is not
    written again until the copy is over, which is long past when its turn comes.
    """

    def __init__(self, make: Callable[[], Any], *, on_cuda: bool) -> None:
        self._wrappers = [make(), make()]
        self._copied = [torch.cuda.Event(), torch.cuda.Event()] if on_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def plan(self, plan: Callable[[Any], object]) -> Any:
        """Plan with the wrapper whose turn it is, and return it."""
        self._turn = 1 - self._turn
        wrapper = self._wrappers[self._turn]
        if self._copied:
            self._copied[self._turn].synchronize()
        plan(wrapper)
        if self._copied:
            self._copied[self._turn].record()
        return wrapper


def _compile(shape: AttentionShape, dtype: torch.dtype) -> None:
    """Compile what this shape needs."""
    window, cap, head = shape.sliding_window > 0, shape.soft_cap > 0, shape.head_dim
    module = gen_batch_prefill_module(
        _KERNELS, dtype, dtype, dtype, torch.int32, head, head, _NO_ROTATION, window, cap, False
    )
    compile_modules(f"{shape.dtype} heads of {head}", [module])
