"""Decode steps over tensors with fixed addresses, so that CUDA graphs can hold them.

A batch is padded to the next of a few sizes. What such a step reads, it reads on the device: slots and positions from
``rows``, all else from the device's state. It also moves the positions on, so as long as the batch stays the same the
host only says *again*. Padding rows stand still, in a row of the state and on a page of the pool that no request has.

A step is two pieces of work: what ends with the hidden states is always replayed; to draw from them is replayed unless
some row filters tokens, which is rare and done as in any other step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tpserve.api import Attention, AttentionBatch, Ops
from tpserve.engine.state import DeviceState, pinned
from tpserve.models.decoder import Decoder, LayerCache
from tpserve.step import Step

__all__ = ["DecodeSteps", "Record", "Recorded"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Work that can be done again.

    Attributes:
        run: does it again.
        result: what the work returned; ``run`` writes it anew.
    """

    run: Callable[[], object]
    result: torch.Tensor


Record = Callable[[Callable[[], torch.Tensor]], Recorded]
"""Does work at least once, and makes it repeatable."""


class DecodeSteps:
    """The decode steps of a few batch sizes, recorded largest first.

    Args:
        decoder: computes them.
        attention: the backend that the decoder runs; it can be captured.
        ops: draws the tokens.
        state: what the device keeps of each request.
        caches: the KV pool, by layer, and in it the spare row's page.
        sizes: of batches, rising.
        record: makes work repeatable.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        ops: Ops,
        state: DeviceState,
        caches: Sequence[LayerCache],
        sizes: Sequence[int],
        record: Record,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._ops = ops
        self._state = state
        self._caches = caches
        self._sizes = sizes
        self._page_size = caches[0][0].shape[1]
        largest, device = sizes[-1], state.device
        # Of a batch of n rows the first 3 * n: slots, positions, and how far each moves on.
        self._rows = torch.zeros(3 * largest, dtype=torch.int64, device=device)
        self._kv_lens = torch.ones(largest, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._slots: list[int] = []
        self._ends: list[int] = []
        self._is_filtered = False
        self._forward: dict[int, Recorded] = {}
        self._draw: dict[int, Recorded] = {}
        for size in reversed(sizes):
            self._load(size, [], [])
            self._attention.replay(self._batch(size))
            forward = record(partial(self._compute, size))
            self._forward[size] = forward
            self._draw[size] = record(partial(self._sample, size, forward.result, any_filter=False))

    def takes(self, step: Step) -> bool:
        """Whether a step is one of these: every sequence computes one token and draws one, and a size holds them."""
        sequences = step.sequences
        if len(sequences) > self._sizes[-1]:
            return False
        return all(each.end - each.start == 1 and each.sample for each in sequences)

    def launch(self, step: Step) -> torch.Tensor:
        """Compute a step whose writes were applied; the tokens drawn, int64 ``[n]``, to be read before the next."""
        slots = [each.slot for each in step.sequences]
        ends = [each.end for each in step.sequences]
        size = self._sizes[bisect_left(self._sizes, len(slots))]
        if slots != self._slots or ends != self._ends or step.params:
            self._load(size, slots, ends)
        self._attention.replay(self._batch(size))
        self._forward[size].run()
        self._ends = [end + 1 for end in ends]
        if self._is_filtered:
            return self._sample(size, self._forward[size].result, any_filter=True)[: len(slots)]
        self._draw[size].run()
        return self._draw[size].result[: len(slots)]

    def forget(self) -> None:
        """Take the next batch for another than the last one: an ordinary step came between them."""
        self._slots = []

    def _load(self, size: int, slots: list[int], ends: list[int]) -> None:
        """Put a batch into the rows."""
        padding = size - len(slots)
        positions = [end - 1 for end in ends]
        rows = [slots + [self._state.spare] * padding, positions + [0] * padding, [1] * len(slots) + [0] * padding]
        self._rows[: 3 * size].copy_(pinned(torch.tensor(rows).view(-1), self._state.device), non_blocking=True)
        self._slots, self._ends = slots, ends
        self._is_filtered = self._state.is_filtered(slots)

    def _batch(self, size: int) -> AttentionBatch:
        padding = size - len(self._slots)
        return AttentionBatch(
            query_lens=[1] * size,
            kv_lens=[*self._ends, *[1] * padding],
            page_table=self._state.pages,
            slots=[*self._slots, *[self._state.spare] * padding],
            slots_tensor=self._rows[:size],
            kv_lens_tensor=self._kv_lens[:size],
            query_starts=self._query_starts[: size + 1],
        )

    def _compute(self, size: int) -> torch.Tensor:
        """Compute one token of each row; hidden states ``[size, hidden]``."""
        slots, positions, _ = self._rows[: 3 * size].view(3, size)
        torch.add(positions, 1, out=self._kv_lens[:size])
        pages = self._state.pages[slots, positions // self._page_size]
        cache_slots = torch.add(positions % self._page_size, pages, alpha=self._page_size)
        self._attention.capture(self._batch(size))
        return self._decoder.forward(self._state.tokens[slots, positions], positions, cache_slots, self._caches)

    def _sample(self, size: int, hidden: torch.Tensor, *, any_filter: bool) -> torch.Tensor:
        """Draw a token for each row into the token pool, and move the positions on; int64 ``[size]``."""
        slots, positions, steps = self._rows[: 3 * size].view(3, size)
        ends = positions + 1
        sampling = self._state.sampling(slots, ends, all_greedy=False, any_filter=any_filter)
        drawn = self._ops.sample(self._decoder.logits(hidden), sampling)
        self._state.tokens[slots, ends] = drawn.int()
        positions += steps
        return drawn
