"""The ``torch`` attention: the reference in torch operators, for any device.

Sequences with one new token are computed together, their caches gathered and padded to the longest; every other
sequence is computed on its own. Where its pages lie one after the other in the pool (on the CPU, where it costs nothing
to look), its cache is read in place.

Only cells that a sequence sees are read, for it: what else the cache holds may be NaN, which a weight of 0 does not
undo. What pads a sequence is its own last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch.nn import functional

from tpserve.api.attention import Attention, AttentionBatch, AttentionShape
from tpserve.api.specs import Options

__all__ = ["Part", "TorchAttention"]

_BLOCK = 512
"""Query rows that share one masked product; bounds the mask's size."""

_ALIGNED = 16
"""What the number of cells of padded sequences is a multiple of."""


class Part(Protocol):
    """Some sequences of a step."""

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend for their tokens: ``[tokens, q_heads, head_dim]``, as the query."""


class TorchAttention(Attention):
    """Scaled dot-product attention over gathered pages."""

    def __init__(self, options: Options, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self._masks = _TailMasks(shape)
        self._parts: list[tuple[torch.Tensor | slice, Part]] = []

    def plan(self, batch: AttentionBatch) -> None:
        """Sort the sequences into parts, and find each part's pages and masks."""
        starts = [0, *accumulate(batch.query_lens)]
        singles = [i for i, length in enumerate(batch.query_lens) if length == 1]
        self._parts = [
            (slice(starts[i], starts[i + 1]), _plan_sequence(self.shape, batch, i, self._masks))
            for i, length in enumerate(batch.query_lens)
            if length > 1
        ]
        if singles:
            rows = [starts[i] for i in singles]
            row = slice(rows[0], rows[0] + 1)
            where = row if len(rows) == 1 else _indices(rows, batch.slots_tensor.device)
            self._parts.append((where, self.plan_singles(batch, singles)))

    def plan_singles(self, batch: AttentionBatch, indices: list[int]) -> Part:
        """Plan the sequences of one new token, of which there is one at least."""
        if len(indices) == 1:
            return _plan_single(self.shape, batch, indices[0])
        return _plan_singles(self.shape, batch, indices)

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend, part by part."""
        if len(self._parts) == 1:
            return self._parts[0][1].run(query, k_cache, v_cache)
        out = torch.empty_like(query)
        for rows, part in self._parts:
            out[rows] = part.run(query[rows], k_cache, v_cache)
        return out


@dataclass(frozen=True, slots=True)
class _Adjacent:
    """The cells of one sequence whose pages lie one after the other: ``count`` from cell ``first`` of the pool on."""

    first: int
    count: int

    def read(self, cache: torch.Tensor) -> torch.Tensor:
        """A view ``[1, kv_heads, cells, head_dim]``."""
        return cache.view(1, -1, *cache.shape[2:]).narrow(1, self.first, self.count).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Scattered:
    """Cells of one sequence or of several, equally many each: int64 ``[sequences, cells]``, numbers in the pool."""

    cells: torch.Tensor

    def read(self, cache: torch.Tensor) -> torch.Tensor:
        """A copy ``[sequences, kv_heads, cells, head_dim]``."""
        pool = cache.view(-1, *cache.shape[2:])
        return pool.index_select(0, self.cells.view(-1)).view(*self.cells.shape, *pool.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _SinglesPart:
    """Sequences with one new token each.

    Attributes:
        cells: what they see, padded to the longest.
        mask: ``[sequences, 1, 1, cells]``, -inf for padding; None without.
    """

    cells: _Adjacent | _Scattered
    mask: torch.Tensor | None
    shape: AttentionShape

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        # With one new token a sequence, the query heads of a group can stand where query rows do: nothing is repeated.
        q = query.reshape(len(query), k_cache.shape[2], -1, query.shape[2])
        k, v = self.cells.read(k_cache), self.cells.read(v_cache)
        return _attend(self.shape, q, k, v, self.mask).reshape(query.shape)


@dataclass(frozen=True, slots=True)
class _Block:
    """Query rows of one sequence and the keys that they see, counted from the part's first cell."""

    rows: slice
    keys: slice
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class _SequencePart:
    """One sequence with several new tokens, in blocks of its rows."""

    cells: _Adjacent | _Scattered
    blocks: list[_Block]
    shape: AttentionShape

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        q = query.unsqueeze(0).transpose(1, 2)
        k, v = self.cells.read(k_cache), self.cells.read(v_cache)
        out = [self._run_block(block, q, k, v) for block in self.blocks]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _run_block(self, block: _Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q[:, :, block.rows], k[:, :, block.keys], v[:, :, block.keys]
        return _attend(self.shape, q, k, v, block.mask, causal=block.causal).transpose(1, 2).squeeze(0)


class _TailMasks:
    """The masks of all blocks, as corners of one.

    Whether a row sees a key depends on their distances from the end alone, and a block's keys end with its own tokens:
    so its mask is the lower right corner, of its size, of the largest.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._mask = torch.empty(0, 0)

    def corner(self, rows: int, keys: int) -> torch.Tensor:
        """``[rows, keys]`` of the dtype of the queries: 0 where a row sees a key, -inf elsewhere."""
        if self._mask.shape[1] < keys:
            self._mask = self._make(max(keys, 2 * self._mask.shape[1]))
        return self._mask[self._mask.shape[0] - rows :, self._mask.shape[1] - keys :]

    def _make(self, keys: int) -> torch.Tensor:
        rows = torch.arange(keys - _BLOCK, keys, device=self._shape.device).unsqueeze(1)
        distance = rows - torch.arange(keys, device=self._shape.device)
        hidden = distance < 0
        if self._shape.sliding_window:
            hidden |= distance >= self._shape.sliding_window
        return _mask_of(hidden, self._shape)


def _plan_single(shape: AttentionShape, batch: AttentionBatch, index: int) -> _SinglesPart:
    end = batch.kv_lens[index]
    return _SinglesPart(_find_cells(shape, batch, index, _first_seen(shape, end - 1), end), None, shape)


def _plan_singles(shape: AttentionShape, batch: AttentionBatch, indices: list[int]) -> _SinglesPart:
    slots, ends = batch.slots_tensor.unsqueeze(1), batch.kv_lens_tensor.long().unsqueeze(1)
    if len(indices) < len(batch.slots):
        chosen = _indices(indices, slots.device)
        slots, ends = slots[chosen], ends[chosen]
    firsts = (ends - shape.sliding_window).clamp_(min=0) if shape.sliding_window else torch.zeros_like(ends)
    seen = max(batch.kv_lens[i] - _first_seen(shape, batch.kv_lens[i] - 1) for i in indices)
    # Masks of other widths are copied once a layer, by torch on CUDA.
    width = -(-seen // _ALIGNED) * _ALIGNED
    positions = firsts + torch.arange(width, device=ends.device)
    mask = _mask_of(positions >= ends, shape).view(len(indices), 1, 1, -1)
    return _SinglesPart(_scattered(shape, batch, slots, torch.minimum(positions, ends - 1)), mask, shape)


def _indices(values: list[int], device: torch.device) -> torch.Tensor:
    """Indices on the device, int64 ``[len(values)]``, without waiting for it."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _plan_sequence(shape: AttentionShape, batch: AttentionBatch, index: int, masks: _TailMasks) -> _SequencePart:
    length, end = batch.query_lens[index], batch.kv_lens[index]
    start = end - length
    if start == 0 and not shape.soft_cap and (not shape.sliding_window or end <= shape.sliding_window):
        blocks = [_Block(slice(0, length), slice(0, end), None, causal=True)]
        return _SequencePart(_find_cells(shape, batch, index, 0, end), blocks, shape)
    base = _first_seen(shape, start)
    blocks = []
    for row in range(0, length, _BLOCK):
        stop = min(row + _BLOCK, length)
        first = _first_seen(shape, start + row)
        mask = masks.corner(stop - row, start + stop - first)
        blocks.append(_Block(slice(row, stop), slice(first - base, start + stop - base), mask, causal=False))
    return _SequencePart(_find_cells(shape, batch, index, base, end), blocks, shape)


def _find_cells(
    shape: AttentionShape, batch: AttentionBatch, index: int, first: int, end: int
) -> _Adjacent | _Scattered:
    """Where positions ``first`` … ``end - 1`` of one sequence are."""
    slot = batch.slots[index]
    if not batch.page_table.is_cuda:
        page, offset = divmod(first, shape.page_size)
        numbers = batch.page_table[slot, page : -(-end // shape.page_size)].tolist()
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return _Adjacent(numbers[0] * shape.page_size + offset, end - first)
    return _scattered(shape, batch, slot, torch.arange(first, end, device=batch.page_table.device).unsqueeze(0))


def _scattered(
    shape: AttentionShape, batch: AttentionBatch, slots: torch.Tensor | int, positions: torch.Tensor
) -> _Scattered:
    """Where positions ``[sequences, cells]`` of the sequences in some slots are."""
    pages = batch.page_table[slots, positions // shape.page_size].long()
    return _Scattered(pages * shape.page_size + positions % shape.page_size)


def _attend(
    shape: AttentionShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """Queries ``[sequences, heads, rows, head_dim]`` over keys and values of as many heads, or of a divisor of that."""
    group = q.shape[1] // k.shape[1]
    if not shape.soft_cap:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=shape.scale, enable_gqa=group > 1
        )
    # Large scores that bfloat16 has rounded are off by more than some of them differ.
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = (q.float() @ k.transpose(2, 3)) * shape.scale
    scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    return ((scores if mask is None else scores + mask).softmax(3) @ v).to(q.dtype)


def _first_seen(shape: AttentionShape, position: int) -> int:
    """The first position that the token at ``position`` sees."""
    return max(0, position + 1 - shape.sliding_window) if shape.sliding_window else 0


def _mask_of(hidden: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
