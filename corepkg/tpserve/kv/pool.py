"""The pages of the KV pool: each is free, in the prefix cache, or held by one request alone.

A request is *admitted* and holds the pages of its longest cached prefix; it *grows* by pages of its own; what has been
computed it *shares*; and it is *released*.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import msgspec

from tpserve.kv.allocator import PageAllocator
from tpserve.kv.radix import Node, RadixTree
from tpserve.tokens import ITEM

__all__ = ["CacheCounters", "Holding", "KvPool"]

NEVER = sys.maxsize // ITEM
"""A page that no sequence fills: with pages so large, a tree keeps nothing."""


class Holding(msgspec.Struct, eq=False):
    """What one request holds.

    Attributes:
        pages: its pages, in the order of its tokens.
        shared: how many of them, from the first, belong to the cache; the others are the request's own.
        node: where it stands in the cache, ``shared`` pages from the root.
    """

    pages: list[int]
    shared: int
    node: Node


class CacheCounters(msgspec.Struct):
    """What the cache has done so far.

    Attributes:
        looked_up: tokens of all requests that were admitted.
        found: how many of them were cached.
        evicted: pages that were given up for others.
    """

    looked_up: int = 0
    found: int = 0
    evicted: int = 0


class KvPool:
    """The pages, and who holds them. Ids are packed, as in :mod:`tpserve.tokens`.

    Args:
        pages: how many there are.
        page_size: tokens a page.
        cache: whether computed pages are kept for others.

    Attributes:
        page_size: tokens a page.
        counters: what the cache has done so far.
    """

    def __init__(self, pages: int, page_size: int, *, cache: bool) -> None:
        self.page_size = page_size
        self.counters = CacheCounters()
        self._pages = PageAllocator(pages)
        self._tree = RadixTree(page_size if cache else NEVER)

    @property
    def total(self) -> int:
        """How many pages there are."""
        return self._pages.total

    @property
    def available(self) -> int:
        """How many pages :meth:`grow` can give: those free, and those cached that no request holds."""
        return self._pages.free_count + self._tree.evictable

    def peek(self, ids: bytes) -> int:
        """How many tokens a request of these ids would find cached now. Changes nothing."""
        return self._tree.peek(ids[:-ITEM]) * self.page_size

    def admit(self, ids: bytes, room: int = 0) -> Holding | None:
        """Hold the longest cached prefix of a request's ``ids``, short of the last: one at least is computed.

        Args:
            ids: all its ids.
            room: how many pages must be available beyond the prefix.

        Returns:
            What it holds now, all of it shared; None, and it holds nothing, if too few pages are available.
        """
        node, pages = self._tree.match(ids[:-ITEM])
        if room > self.available:
            self._tree.unlock(node)
            return None
        self.counters.looked_up += len(ids) // ITEM
        self.counters.found += len(pages) * self.page_size
        return Holding(pages, len(pages), node)

    def grow(self, holding: Holding, count: int) -> list[int]:
        """Add ``count`` pages to a holding: these. The caller has seen that as many are available."""
        missing = count - self._pages.free_count
        if missing > 0:
            evicted = self._tree.evict(missing)
            self.counters.evicted += len(evicted)
            self._pages.free(evicted)
        pages = self._pages.alloc(count)
        holding.pages += pages
        return pages

    def share(self, holding: Holding, ids: bytes) -> range:
        """Put what has been computed into the cache, as far as it fills pages.

        Call it when the step that computes it has been launched and not while that step is made up: where the cache has
        the same already, the request takes over the cache's pages, and its own are free at once.

        Args:
            holding: what the request holds.
            ids: the ids at all positions computed, by steps that are done or launched.

        Returns:
            Which of ``holding.pages`` are others now; the engine's page table must be told.
        """
        size, start = self._tree.page_bytes, holding.shared
        end = len(ids) // size
        if end <= start:
            return range(0)
        own = holding.pages[start:end]
        holding.node, found = self._tree.extend(holding.node, ids[start * size : end * size], own)
        holding.shared = end
        swapped = range(start, start + len(found))
        holding.pages[start : swapped.stop] = found
        self._pages.free(own[: len(found)])
        return swapped

    def release(self, holding: Holding, ids: bytes) -> None:
        """Take all pages back from a request that is finished, aborted or retracted; what it has computed is kept.

        Args:
            holding: what it held; of no use any more.
            ids: as for :meth:`share`.
        """
        self.share(holding, ids)
        self._pages.free(holding.pages[holding.shared :])
        self._tree.unlock(holding.node)

    def clear(self) -> None:
        """Forget all that is cached but for what requests hold."""
        self._pages.free(self._tree.evict(self._tree.evictable))

    def check(self, holdings: Collection[Holding]) -> None:
        """Assert that every page is free, in the cache, or held by one request alone, and that the cache is whole.

        Takes time for every page.

        Args:
            holdings: what all requests hold.
        """
        self.check_counts(holdings)
        self._tree.check(holding.node for holding in holdings)
        for holding in holdings:
            shared = holding.pages[: holding.shared]
            assert shared == self._tree.path(holding.node), "a request's shared pages are not those where it stands"
        cached = [node.pages for node in self._tree.nodes()]
        self._pages.check([*cached, *(holding.pages[holding.shared :] for holding in holdings)])

    def check_counts(self, holdings: Collection[Holding]) -> None:
        """Assert that the numbers of pages free, cached and held alone add up: a check for every round."""
        free, cached = self._pages.free_count, self._tree.size
        own = sum([len(holding.pages) - holding.shared for holding in holdings])
        assert free + cached + own == self.total, f"{free} pages free, {cached} cached, {own} held, of {self.total}"
