"""How FlashInfer wants a batch: the pages of all sequences in one array, one sequence's after the other's.

The host knows the lengths, and so where each sequence's pages begin; which pages they are, only the device knows.
"""

from __future__ import annotations

import torch

from tpserve.api import AttentionShape

__all__ = ["gather_pages", "lay_out", "layout_size", "parts_of", "workspace_bytes"]

_ROWS = 16
"""Query rows of a program of decode, the heads of a group side by side."""

_MOST_ROWS = 128
"""Of a program of prefill."""

_PROGRAMS = 2
"""Programs for each multiprocessor, up to which FlashInfer cuts caches."""


def layout_size(sequences: int) -> int:
    """How many numbers a layout has."""
    return 3 * sequences + 2


def lay_out(kv_lens: list[int], slots: list[int], page_size: int, columns: int, *, pin: bool = False) -> torch.Tensor:
    """The layout of a batch, int32 ``[layout_size(n)]`` on the host; :func:`parts_of` takes it apart.

    Args:
        kv_lens: cached tokens of each of n sequences, at least 1.
        slots: the row of the page table of each.
        page_size: tokens a page.
        columns: of the page table.
        pin: in memory that a device can copy from on its own.
    """
    packed = torch.empty(layout_size(len(slots)), dtype=torch.int32, pin_memory=pin)
    starts, last_lens, bases = parts_of(packed)
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    before_last = (lengths - 1) // page_size
    starts[0] = 0
    torch.cumsum(before_last + 1, 0, dtype=torch.int32, out=starts[1:])
    torch.sub(lengths, before_last * page_size, out=last_lens)
    torch.sub(torch.tensor(slots, dtype=torch.int32) * columns, starts[:-1], out=bases[:-1])
    bases[-1] = 0
    return packed


def parts_of(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parts of a layout of n sequences.

    Returns:
        ``[n + 1]`` where the pages of each sequence begin in the array, and where the last one's end; ``[n]`` tokens in
        the last page of each; ``[n + 1]`` what to add to a place in the array to find it in the flattened page table,
        for each sequence, and for places behind all of them.
    """
    sequences = (len(packed) - 2) // 3
    starts, last_lens, bases = torch.split(packed, [sequences + 1, sequences, sequences + 1])
    return starts, last_lens, bases


def gather_pages(packed: torch.Tensor, table: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """Write the array, on the device.

    Args:
        packed: the layout.
        table: int32 ``[slots, columns]``, with at least as many cells as there are places.
        places: int32 ``[m]``: the first m natural numbers; places behind the last page get any number of the table.
        out: int32 ``[m]``.
    """
    starts, _, bases = parts_of(packed)
    owners = torch.searchsorted(starts[1:], places, right=True, out_int32=True)
    torch.index_select(table.view(-1), 0, bases[owners] + places, out=out)


def workspace_bytes(shape: AttentionShape, processors: int) -> int:
    """Bytes of what programs hand to each other where caches are cut: a row of float32 and a weight for each head.

    Args:
        shape: what is computed.
        processors: multiprocessors of the device.
    """
    group = shape.q_heads // shape.kv_heads
    cut = _PROGRAMS * processors // shape.kv_heads
    rows = _ROWS if group <= _ROWS else _MOST_ROWS
    decode = rows * max(cut, shape.max_running + -(-shape.max_running * group // rows))
    return 4 * shape.q_heads * max(decode, _MOST_ROWS * cut) * (shape.head_dim + 1) + 4096
