"""Hands out the pages of the KV pool and the rows (*slots*) of the engine's tables.

Which number is handed out next follows from the calls made before and from nothing else, so ranks that make the same
calls hold the same pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

__all__ = ["PageAllocator", "SlotAllocator"]


class PageAllocator:
    """The pages 0 … ``pages - 1``, each free or held.

    Pages freed last are handed out first, in the order in which they were freed; a fresh pool hands out 0, 1, 2, …

    Args:
        pages: how many there are.
    """

    def __init__(self, pages: int) -> None:
        self._stack = list(range(pages - 1, -1, -1))
        self._held = bytearray(pages)

    @property
    def total(self) -> int:
        """How many pages there are."""
        return len(self._held)

    @property
    def free_count(self) -> int:
        """How many pages are free."""
        return len(self._stack)

    def alloc(self, count: int) -> list[int]:
        """Hold ``count`` pages; the caller has seen that as many are free."""
        assert 0 <= count <= len(self._stack), f"{count} pages wanted, {len(self._stack)} free"
        if not count:
            return []
        pages = self._stack[: -count - 1 : -1]
        del self._stack[-count:]
        for page in pages:
            self._held[page] = 1
        return pages

    def free(self, pages: list[int]) -> None:
        """Give held pages back."""
        for page in pages:
            assert self._held[page], f"page {page} freed and not held"
            self._held[page] = 0
        self._stack.extend(reversed(pages))

    def check(self, owners: Iterable[list[int]]) -> None:
        """Assert that every page is either free or held by exactly one of ``owners``; takes time for every page."""
        marks, owned = bytearray(self.total), 0
        for pages in owners:
            owned += len(pages)
            for page in pages:
                marks[page] = 1
        assert owned + len(self._stack) == self.total, f"{owned} pages owned, {len(self._stack)} free, of {self.total}"
        assert marks == self._held, "pages are owned and not held, or held and not owned"
        for page in self._stack:
            marks[page] = 1
        assert marks.count(1) == self.total, "a page is owned twice, or owned and free"


class SlotAllocator:
    """The rows 0 … ``slots - 1``; the lowest free one is handed out first.

    Args:
        slots: how many there are.
    """

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._heap = list(range(slots))

    @property
    def free_count(self) -> int:
        """How many slots are free."""
        return len(self._heap)

    def alloc(self) -> int:
        """Hold the lowest free slot; the caller has seen that one is free."""
        assert self._heap, "a slot wanted, none free"
        return heappop(self._heap)

    def free(self, slot: int) -> None:
        """Give a held slot back."""
        assert slot not in self._heap, f"slot {slot} freed and not held"
        heappush(self._heap, slot)

    def check(self, owned: Iterable[int]) -> None:
        """Assert that every slot is either free or in ``owned``, once."""
        assert sorted([*owned, *self._heap]) == list(range(self.total)), "a slot is lost, or owned twice"
