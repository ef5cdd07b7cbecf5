"""What a rank keeps on its device for each running request: a row of tokens, a row of pages, sampling parameters."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from tpserve.api import SamplingBatch
from tpserve.step import EngineLimits, SlotParams, Step
from tpserve.tokens import TYPECODE

__all__ = ["DeviceState", "pinned", "upload"]

_GREEDY = SlotParams(slot=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def upload(device: str, *columns: Iterable[int]) -> tuple[torch.Tensor, ...]:
    """Copy lists of integers to the device at once: int64 ``[length]`` each, views of one tensor."""
    lists = [list(column) for column in columns]
    packed = torch.tensor([*chain.from_iterable(lists)], dtype=torch.int64)
    return torch.split(_send(packed, device), [len(each) for each in lists])


class DeviceState:
    """One row (*slot*) for each running request, and a last one for what pads a batch.

    Attributes:
        spare: the last row. Its pages are one behind those of the pool.
        tokens: int32 ``[slots + 1, max_context + 1]``; the token at ``max_context`` is drawn and never computed.
        pages: int32 ``[slots + 1, max_pages]``.
    """

    def __init__(self, limits: EngineLimits, device: str) -> None:
        self.device = device
        self.spare = limits.slots
        rows, max_pages = limits.slots + 1, -(-limits.max_context // limits.page_size)
        self.tokens = torch.zeros(rows, limits.max_context + 1, dtype=torch.int32, device=device)
        self.pages = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.pages[self.spare] = limits.pages
        # temperature, top_p, min_p: one tensor, so that a step gathers them at once.
        self._shares = torch.zeros(3, rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self._seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self._params = [_GREEDY] * rows

    def apply(self, step: Step) -> None:
        """Write what a step changes; later writes win."""
        _write(self.tokens, [(each.slot, each.start, each.tokens) for each in step.tokens])
        _write(self.pages, [(each.slot, each.start, each.pages) for each in step.pages])
        if step.params:
            self._set_params({params.slot: params for params in step.params})

    def is_greedy(self, slots: Iterable[int]) -> bool:
        """Whether all of these slots take the most likely token."""
        return all(self._params[slot].temperature == 0 for slot in slots)

    def is_filtered(self, slots: Iterable[int]) -> bool:
        """Whether any of these slots has a top_k, top_p or min_p."""
        chosen = (self._params[slot] for slot in slots)
        return any(each.top_k or each.top_p < 1 or each.min_p for each in chosen)

    def sampling(
        self, slots: torch.Tensor, positions: torch.Tensor, *, all_greedy: bool, any_filter: bool
    ) -> SamplingBatch:
        """How to draw one token for each slot: int64 ``[n]``, at ``positions`` int64 ``[n]``."""
        temperature, top_p, min_p = self._shares.index_select(1, slots).unbind(0)
        return SamplingBatch(
            temperature=temperature,
            top_k=self._top_k[slots],
            top_p=top_p,
            min_p=min_p,
            seed=self._seed[slots],
            position=positions,
            all_greedy=all_greedy,
            any_filter=any_filter,
        )

    def _set_params(self, changed: dict[int, SlotParams]) -> None:
        rows = changed.values()
        for params in rows:
            self._params[params.slot] = params
        slots, top_k, seed = upload(
            self.device, changed, (each.top_k for each in rows), (_signed(each.seed) for each in rows)
        )
        shares = [[each.temperature for each in rows], [each.top_p for each in rows], [each.min_p for each in rows]]
        self._shares[:, slots] = _send(torch.tensor(shares, dtype=torch.float32), self.device)
        self._top_k[slots] = top_k.int()
        self._seed[slots] = seed


def _write(table: torch.Tensor, writes: Sequence[tuple[int, int, list[int] | array[int]]]) -> None:
    """Put values into rows of a table, in order: (row, first column, values)."""
    if not writes:
        return
    packed = array(TYPECODE)
    for _, _, each in writes:
        packed.extend(each)
    lengths = np.array([len(each) for _, _, each in writes])
    firsts = np.array([row * table.shape[1] + start for row, start, _ in writes])
    cells = np.repeat(firsts - lengths.cumsum() + lengths, lengths) + np.arange(len(packed))
    values = np.asarray(packed)
    if len({row for row, _, _ in writes}) < len(writes):
        # A device writes in any order: of several values for one cell it gets the last alone.
        cells, last = np.unique(cells[::-1], return_index=True)
        values = values[::-1][last]
    device = str(table.device)
    table.view(-1)[_send(torch.from_numpy(cells), device)] = _send(torch.from_numpy(values), device)


def pinned(host: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor from which a copy to the device need not be waited for."""
    return host.pin_memory() if device.startswith("cuda") else host


def _send(host: torch.Tensor, device: str) -> torch.Tensor:
    """Copy a tensor to the device without waiting for it; on the CPU it is there already."""
    return pinned(host, device).to(device, non_blocking=True)


def _signed(seed: int) -> int:
    """A seed modulo 2**64, as a signed integer."""
    return ((seed + (1 << 63)) % (1 << 64)) - (1 << 63)
