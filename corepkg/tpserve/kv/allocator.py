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
        self.total = pages
        self._stack = list(range(pages - 1, -1, -1))

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
        return pages

    def free(self, pages: list[int]) -> None:
        """Give held pages back."""
        self._stack.extend(reversed(pages))

    def check(self, owners: Iterable[list[int]]) -> None:
        """Assert that every page is either free or held by exactly one of ``owners``; takes time for every page."""
        marks, found = bytearray(self.total), 0
        for pages in (self._stack, *owners):
            found += len(pages)
            for page in pages:
                marks[page] = 1
        lost = marks.count(0)
        assert not lost, f"{lost} pages are lost, the first is {marks.index(0)}"
        assert found == self.total, f"{found - self.total} pages too many: some are held twice, or held and free"


class SlotAllocator:
    """The rows 0 … ``slots - 1``; the lowest free one is handed out first.

    Args:
        slots: how many there are.
    """

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._heap = list(range(slots))
        self._held = bytearray(slots)

    @property
    def free_count(self) -> int:
        """How many slots are free."""
        return len(self._heap)

    def alloc(self) -> int:
        """Hold the lowest free slot; the caller has seen that one is free."""
        assert self._heap, "a slot wanted, none free"
        slot = heappop(self._heap)
        self._held[slot] = 1
        return slot

    def free(self, slot: int) -> None:
        """Give a held slot back."""
        assert self._held[slot], f"slot {slot} freed and not held"
        self._held[slot] = 0
        heappush(self._heap, slot)

    def check(self, owned: Iterable[int]) -> None:
        """Assert that every slot is either free or in ``owned``, once."""
        assert sorted([*owned, *self._heap]) == list(range(self.total)), "a slot is lost, or owned twice"
