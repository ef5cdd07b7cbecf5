"""The ``torch`` attention: the reference in torch operators, for any device.

Sequences with one new token are computed together, their caches gathered and padded to the longest; every other
sequence is computed on its own. Where its pages lie one after the other in the pool (on the CPU, where it costs nothing
to look), its cache is read in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from tpserve.api.attention import Attention, AttentionBatch, AttentionShape
from tpserve.api.specs import Options

__all__ = ["TorchAttention"]

_BLOCK = 512
"""Query rows that share one masked product; bounds the mask's size."""


class TorchAttention(Attention):
    """Scaled dot-product attention over gathered pages."""

    def __init__(self, options: Options, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self._masks = _TailMasks(shape)
        self._parts: list[tuple[torch.Tensor | slice, _Part]] = []

    def plan(self, batch: AttentionBatch) -> None:
        """Sort the sequences into parts, and find each part's pages and mask."""
        starts = _running_sum(batch.query_lens)
        singles = [i for i, length in enumerate(batch.query_lens) if length == 1]
        if len(singles) < 2:
            singles = []
        alone = [i for i, length in enumerate(batch.query_lens) if length > 1 or not singles]
        self._parts = [
            (slice(starts[i], starts[i] + batch.query_lens[i]), _plan_sequence(self.shape, batch, i, self._masks))
            for i in alone
        ]
        if singles:
            rows = torch.tensor([starts[i] for i in singles], device=batch.page_table.device) if alone else slice(None)
            self._parts.append((rows, _plan_decode(self.shape, batch, singles)))

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend, part by part."""
        if len(self._parts) == 1:
            return self._parts[0][1].run(query, k_cache, v_cache)
        out = torch.empty_like(query)
        for rows, part in self._parts:
            out[rows] = part.run(query[rows], k_cache, v_cache)
        return out


@dataclass(frozen=True, slots=True)
class _Block:
    """Query rows of one sequence and the keys that they see; without a mask and not causal, each row sees all."""

    rows: slice
    keys: slice
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class _SequencePart:
    """One sequence.

    Attributes:
        pages: its pages from the first that it sees; a slice where they lie one after the other.
        blocks: its query rows; keys count from the first token of ``pages``.
    """

    pages: torch.Tensor | slice
    blocks: list[_Block]
    scale: float

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        q = query.unsqueeze(0).transpose(1, 2)
        k, v = self._heads(k_cache), self._heads(v_cache)
        if len(self.blocks) == 1:
            return self._attend(self.blocks[0], q, k, v)
        return torch.cat([self._attend(block, q[:, :, block.rows], k, v) for block in self.blocks])

    def _heads(self, cache: torch.Tensor) -> torch.Tensor:
        """This sequence's cells as ``[1, kv_heads, tokens, head_dim]``."""
        return cache[self.pages].flatten(0, 1).unsqueeze(0).transpose(1, 2)

    def _attend(self, block: _Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = functional.scaled_dot_product_attention(
            q,
            k[:, :, block.keys],
            v[:, :, block.keys],
            attn_mask=block.mask,
            is_causal=block.causal,
            scale=self.scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2).squeeze(0)


@dataclass(frozen=True, slots=True)
class _DecodePart:
    """Sequences with one new token each.

    Attributes:
        pages: int64 ``[sequences * width]``: each one's pages from the first that it sees, padded with its last.
        mask: ``[sequences, 1, 1, width * page_size]``, -inf for cells that are not seen.
    """

    pages: torch.Tensor
    mask: torch.Tensor
    scale: float

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        count, kv_heads = len(query), k_cache.shape[2]
        # With one new token a sequence, the query heads of a group can stand where query rows do: nothing is repeated.
        q = query.reshape(count, kv_heads, -1, query.shape[2])
        k, v = self._heads(k_cache, count), self._heads(v_cache, count)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=self.scale)
        return out.reshape(query.shape)

    def _heads(self, cache: torch.Tensor, count: int) -> torch.Tensor:
        """The cells as ``[sequences, kv_heads, tokens, head_dim]``."""
        return cache.index_select(0, self.pages).view(count, -1, *cache.shape[2:]).transpose(1, 2)


_Part = _SequencePart | _DecodePart


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


def _plan_sequence(shape: AttentionShape, batch: AttentionBatch, index: int, masks: _TailMasks) -> _SequencePart:
    length, end = batch.query_lens[index], batch.kv_lens[index]
    start = end - length
    first_page = _first_seen(shape, start) // shape.page_size
    row = batch.page_table[batch.slots[index], first_page : -(-end // shape.page_size)]
    base = first_page * shape.page_size
    if start == 0 and length > 1 and (not shape.sliding_window or end <= shape.sliding_window):
        blocks = [_Block(slice(0, length), slice(0, end), None, causal=True)]
    else:
        blocks = [
            _plan_block(shape, masks, start, base, rows=slice(at, min(at + _BLOCK, length)))
            for at in range(0, length, _BLOCK)
        ]
    return _SequencePart(_adjacent(row), blocks, shape.scale)


def _plan_block(shape: AttentionShape, masks: _TailMasks, start: int, base: int, rows: slice) -> _Block:
    first, end = _first_seen(shape, start + rows.start), start + rows.stop
    count = rows.stop - rows.start
    mask = masks.corner(count, end - first) if count > 1 else None
    return _Block(rows, slice(first - base, end - base), mask, causal=False)


def _plan_decode(shape: AttentionShape, batch: AttentionBatch, indices: list[int]) -> _DecodePart:
    slots, ends = batch.slots_tensor, batch.kv_lens_tensor.long()
    if len(indices) < len(batch.slots):
        chosen = torch.tensor(indices, device=slots.device)
        slots, ends = slots[chosen], ends[chosen]
    slots, ends = slots.unsqueeze(1), ends.unsqueeze(1)
    seen = [batch.kv_lens[i] - _first_seen(shape, batch.kv_lens[i] - 1) for i in indices]
    first = (ends - shape.sliding_window).clamp_(min=0) if shape.sliding_window else torch.zeros_like(ends)
    first_page, last_page = first // shape.page_size, (ends - 1) // shape.page_size
    # A window that begins inside a page touches one page more.
    width = -(-max(seen) // shape.page_size) + bool(shape.sliding_window)
    numbers = torch.minimum(first_page + torch.arange(width, device=ends.device), last_page)
    pages = batch.page_table[slots, numbers].flatten().long()
    cells = first_page * shape.page_size + torch.arange(width * shape.page_size, device=ends.device)
    mask = _mask_of((cells < first) | (cells >= ends), shape)
    return _DecodePart(pages, mask.view(len(indices), 1, 1, -1), shape.scale)


def _first_seen(shape: AttentionShape, position: int) -> int:
    """The first position that the token at ``position`` sees."""
    return max(0, position + 1 - shape.sliding_window) if shape.sliding_window else 0


def _adjacent(pages: torch.Tensor) -> torch.Tensor | slice:
    """A slice for pages that lie one after the other, where it costs nothing to look."""
    if pages.is_cuda:
        return pages.long()
    numbers = pages.tolist()
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers))
    return pages.long()


def _mask_of(hidden: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _running_sum(lengths: list[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts
