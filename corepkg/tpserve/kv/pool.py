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

SHARE = 256
"""Evicts at least this part of the pool: else every new page of a full one would be a change of what is cached."""

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
        version: changes whenever what :meth:`peek` finds may.
        counters: what the cache has done so far.
    """

    def __init__(self, pages: int, page_size: int, *, cache: bool) -> None:
        self.page_size = page_size
        self.version = 0
        self.counters = CacheCounters()
        self._pages = PageAllocator(pages)
        self._tree = RadixTree(page_size if cache else NEVER)

    @property
    def total(self) -> int:
        """How many pages there are."""
        return self._pages.total

    @property
    def available(self) -> int:
        """How many pages can be given: those free, and those cached that no request holds."""
        return self._pages.free_count + self._tree.evictable

    def peek(self, ids: bytes) -> tuple[int, int]:
        """What a request of these ids would find now. Changes nothing.

        Returns:
            How many tokens are cached, and how many of the pages that hold them count as available still.
        """
        pages, evictable = self._tree.peek(ids[:-ITEM])
        return pages * self.page_size, evictable

    def admit(self, ids: bytes) -> Holding:
        """Hold the longest cached prefix of a request's ``ids``, short of the last: one at least is computed."""
        self.version += 1
        node, pages = self._tree.match(ids[:-ITEM])
        self.counters.looked_up += len(ids) // ITEM
        self.counters.found += len(pages) * self.page_size
        return Holding(pages, len(pages), node)

    def grow(self, holding: Holding, count: int) -> list[int]:
        """Add ``count`` pages to a holding: these. The caller has seen that as many are available."""
        missing = count - self._pages.free_count
        if missing > 0:
            self.version += 1
            evicted = self._tree.evict(min(max(missing, self.total // SHARE), self._tree.evictable))
            self.counters.evicted += len(evicted)
            self._pages.free(evicted)
        pages = self._pages.alloc(count)
        holding.pages += pages
        return pages

    def catch_up(self, holding: Holding, ids: bytes, computed: int) -> range:
        """Take over what others have put into the cache behind a request's shared pages, if that spares it work.

        Its own pages at these places are free at once.

        Args:
            holding: what the request holds.
            ids: all its ids.
            computed: how many positions it has computed.

        Returns:
            Which of ``holding.pages`` are others now, and hold computed tokens; the engine's page table must be told.
        """
        start = holding.shared * self._tree.page_bytes
        found, _ = self._tree.peek(ids[start:-ITEM], holding.node)
        stop = holding.shared + found
        if stop * self.page_size <= computed:
            return range(0)
        self.version += 1
        holding.node, pages = self._tree.follow(holding.node, ids[start:-ITEM])
        swapped = range(holding.shared, stop)
        self._pages.free(holding.pages[swapped.start : swapped.stop])
        holding.pages[swapped.start : swapped.stop] = pages
        holding.shared = stop
        return swapped

    def share(self, holding: Holding, ids: bytes) -> None:
        """Put what a request has computed into the cache, as far as it fills pages that the cache does not have.

        Args:
            holding: what the request holds.
            ids: the ids at all positions that it has computed, by steps that are done or will be before others read.
        """
        size = self._tree.page_bytes
        start, end = holding.shared, len(ids) // size
        if end <= start or self._tree.peek(ids[start * size :], holding.node)[0]:
            return
        self.version += 1
        holding.node = self._tree.extend(holding.node, ids[start * size : end * size], holding.pages[start:end])
        holding.shared = end

    def release(self, holding: Holding, ids: bytes) -> None:
        """Take all pages back from a request that is finished, aborted or retracted; what it has computed is kept.

        Args:
            holding: what it held; of no use any more.
            ids: as for :meth:`share`.
        """
        self.version += 1
        size, start = self._tree.page_bytes, holding.shared
        holding.node, found = self._tree.follow(holding.node, ids[start * size :])
        self._pages.free(holding.pages[start : start + len(found)])
        holding.shared += len(found)
        self.share(holding, ids)
        self._pages.free(holding.pages[holding.shared :])
        self._tree.unlock(holding.node)

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
