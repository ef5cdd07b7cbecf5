"""What the scheduler asks of the engine: the one seam between planning on the host and computing on the device.

The engine keeps, on its device, a token pool and a page table with one row (*slot*) for each running request,
and each slot's sampling parameters. A step first writes what changed, then computes a stretch of each sequence.
The token drawn for position ``end`` lands in the token pool, so the next step can be launched before the host has
read it.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

__all__ = [
    "MOST_PAGES",
    "Engine",
    "EngineLimits",
    "PageWrite",
    "Pending",
    "Sequence",
    "SlotParams",
    "Step",
    "TokenWrite",
]

MOST_PAGES = 1 << 26


class TokenWrite(msgspec.Struct, frozen=True):
    """Put ``tokens`` into row ``slot`` of the token pool, from position ``start`` on."""

    slot: int
    start: int
    tokens: list[int] | array[int]


class PageWrite(msgspec.Struct, frozen=True):
    """Put ``pages`` into row ``slot`` of the page table, from page index ``start`` on."""

    slot: int
    start: int
    pages: list[int]


class SlotParams(msgspec.Struct, frozen=True):
    """Set how row ``slot`` is sampled; fields as in SamplingParams."""

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class Sequence(msgspec.Struct, frozen=True):
    """Compute positions ``start`` … ``end - 1`` of row ``slot``.

    Attributes:
        slot: the row.
        start: the first position to compute; all before are cached.
        end: one past the last.
        sample: draw the token at position ``end`` from the last position's logits.
    """

    slot: int
    start: int
    end: int
    sample: bool


class Step(msgspec.Struct, frozen=True):
    """One batch. Writes are applied first, in order."""

    sequences: list[Sequence]
    tokens: list[TokenWrite] = []
    pages: list[PageWrite] = []
    params: list[SlotParams] = []


class EngineLimits(msgspec.Struct, frozen=True):
    """What an engine has, agreed over all ranks. The ranges, wider than any machine, are checked where one is decoded.

    Attributes:
        pages: pages of the KV pool, numbered from 0; the same number on every rank.
        page_size: tokens a page.
        slots: rows of the token pool and page table.
        max_context: the longest sequence, prompt and output together.
        vocab_size: token ids are below this.
        eos_ids: tokens that end a text, sorted.
    """

    pages: Annotated[int, Meta(ge=1, le=MOST_PAGES)]
    page_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    slots: Annotated[int, Meta(ge=1, le=1 << 20)]
    max_context: Annotated[int, Meta(ge=1, le=1 << 31)]
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 31)]
    eos_ids: tuple[int, ...]


class Pending(Protocol):
    """A step that has been launched."""

    def tokens(self) -> list[int]:
        """Wait for the step; the token drawn for each sequence with ``sample``, in batch order."""


class Engine(Protocol):
    """Computes steps."""

    @property
    def limits(self) -> EngineLimits:
        """What this engine has."""

    def launch(self, step: Step) -> Pending:
        """Start a step. Steps are computed in the order launched; the next may be launched before this one is read."""

    def close(self) -> None:
        """Release the device and the tensor groups. May be called twice."""
