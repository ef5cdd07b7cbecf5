"""The attention backend: what a step's plan is, and how the kernels are launched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from tpserve.api import Attention, AttentionBatch, AttentionShape, Options
from tpserve_attn_triton.decode import FIELDS, cut, decode
from tpserve_attn_triton.device import power_of_two
from tpserve_attn_triton.prefill import prefill
from tpserve_attn_triton.tiles import Tile, choose_tiles

__all__ = ["TritonAttention"]

_PROGRAMS = 2
"""Programs of the decode kernel that a multiprocessor holds, about: no part is longer than the share of one of them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """One step.

    Attributes:
        batch: the sequences.
        singles: how many of them have one new token.
        blocks: int32 ``[blocks, 4]``: the blocks of query rows of the others; None without.
    """

    batch: AttentionBatch
    singles: int
    blocks: torch.Tensor | None


class TritonAttention(Attention):
    """Paged attention in Triton: one launch a layer for the sequences with one new token, one for those with more.

    A step with one new token for every sequence reads its lengths, slots and page table on the device, and launches
    what follows from the number of sequences alone: so a CUDA graph holds all of it, and the host does nothing before a
    replay.
    """

    def __init__(self, options: Options, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        device = torch.device(shape.device)
        sm, processors = 0, 4
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            sm, processors = 10 * properties.major + properties.minor, properties.multi_processor_count
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._group = shape.q_heads // shape.kv_heads
        self._columns = max(16, power_of_two(shape.head_dim))
        self._tiles = choose_tiles(self._dtype.itemsize, self._columns, sm, self._group)
        self._scale, self._cap = shape.scale * math.log2(math.e), shape.soft_cap * math.log2(math.e)
        if shape.soft_cap:
            self._scale *= 2 / shape.soft_cap
        # Programs that find no part end at once.
        self._spare = -(-_PROGRAMS * processors // shape.kv_heads)
        self._processors = processors
        parts = shape.max_running + self._spare
        self._parts = torch.empty(parts, FIELDS, dtype=torch.int32, device=device)
        self._used = torch.zeros(1, dtype=torch.int32, device=device)
        self._means = torch.empty(parts, shape.q_heads, shape.head_dim, dtype=torch.float32, device=device)
        self._scores = torch.empty(parts, shape.q_heads, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(parts, shape.kv_heads, dtype=torch.int32, device=device)
        self._everyone = torch.arange(shape.max_running, dtype=torch.int32, device=device)
        self._overlap = sm >= 90
        self._is_cut_anew = True
        self._plan: _Plan

    def plan(self, batch: AttentionBatch) -> None:
        """Cut long caches and long prompts into the work of programs."""
        if batch.is_decode:
            self._plan = _Plan(batch, len(batch.slots), None)
            members = self._everyone
        else:
            singles = [i for i, length in enumerate(batch.query_lens) if length == 1]
            blocks = _query_blocks(batch, self._tiles.prefill.rows // self._group)
            numbers = [number for block in blocks for number in block]
            packed = torch.tensor([*numbers, *singles], dtype=torch.int32, pin_memory=batch.page_table.is_cuda)
            packed = packed.to(batch.page_table.device, non_blocking=True)
            self._plan = _Plan(batch, len(singles), packed[: len(numbers)].view(-1, 4))
            members = packed[len(numbers) :]
        if self._plan.singles:
            cut[(1,)](
                members,
                batch.slots_tensor,
                batch.kv_lens_tensor,
                batch.query_starts,
                self._parts,
                self._used,
                self._plan.singles,
                self._spare,
                self.shape.sliding_window,
                ROOM=power_of_two(self.shape.max_running),
                BLOCK=self._decode_tile().block,
                FIELDS=FIELDS,
                num_warps=4,
            )
            self._is_cut_anew = True

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend."""
        assert query.stride(2) == 1
        assert k_cache.is_contiguous()
        assert v_cache.is_contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._plan.blocks is not None:
            self._run_blocks(self._plan.blocks, query, k_cache, v_cache, out)
        if self._plan.singles:
            self._run_singles(query, k_cache, v_cache, out)
        return out

    def _decode_tile(self) -> Tile:
        """Large programs, which read faster where lengths differ, but for two cases.

        Beside the small ones of a single sequence the product that follows finds room to ask for its first weights. And
        between three and four programs a multiprocessor are all there at once only if they are small.
        """
        programs = self._plan.singles * self.shape.kv_heads
        small = self._plan.singles == 1 or 3 * self._processors < programs <= 4 * self._processors
        return self._tiles.small if small else self._tiles.large

    def _run_blocks(
        self, blocks: torch.Tensor, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        shape, table, tile = self.shape, self._plan.batch.page_table, self._tiles.prefill
        prefill[(len(blocks) * shape.kv_heads,)](
            query,
            k_cache,
            v_cache,
            table,
            blocks,
            out,
            query.stride(0),
            query.stride(1),
            table.stride(0),
            self._scale,
            self._cap,
            shape.sliding_window,
            KV_HEADS=shape.kv_heads,
            GROUP=self._group,
            ROWS=tile.rows,
            HEAD_DIM=shape.head_dim,
            COLUMNS=self._columns,
            PAGE_SIZE=shape.page_size,
            BLOCK=tile.block,
            WINDOWED=shape.sliding_window > 0,
            CAPPED=shape.soft_cap > 0,
            WIDE=not query.is_cuda,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _run_singles(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        shape, table, tile = self.shape, self._plan.batch.page_table, self._decode_tile()
        decode[((self._plan.singles + self._spare) * shape.kv_heads,)](
            query,
            k_cache,
            v_cache,
            table,
            self._parts,
            self._used,
            out,
            self._means,
            self._scores,
            self._arrived,
            query.stride(0),
            query.stride(1),
            table.stride(0),
            self._scale,
            self._cap,
            KV_HEADS=shape.kv_heads,
            GROUP=self._group,
            HEADS=power_of_two(self._group),
            ROWS=tile.rows,
            HEAD_DIM=shape.head_dim,
            COLUMNS=self._columns,
            PAGE_SIZE=shape.page_size,
            BLOCK=tile.block,
            CAPPED=shape.soft_cap > 0,
            WIDE=not query.is_cuda,
            FIELDS=FIELDS,
            OVERLAP=self._overlap,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **({"launch_pdl": True} if self._overlap and not self._is_cut_anew else {}),
        )
        self._is_cut_anew = False


def _query_blocks(batch: AttentionBatch, most: int) -> list[tuple[int, int, int, int]]:
    """First row, its position, tokens and slot of each block of at most ``most`` new tokens.

    Long sequences come first, and of each its end, so that a step ends with short blocks; those of one sequence stay
    together, for they read the same cache.
    """
    sequences = zip(accumulate(batch.query_lens, initial=0), batch.query_lens, batch.kv_lens, batch.slots, strict=False)
    return [
        (start + first, kv - new + first, min(most, new - first), slot)
        for start, new, kv, slot in sorted(sequences, key=lambda sequence: -sequence[2])
        if new > 1
        for first in reversed(range(0, new, most))
    ]
