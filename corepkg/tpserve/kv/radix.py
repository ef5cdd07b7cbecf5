"""The prefix cache: which pages hold the keys and values of which token ids.

A radix tree over whole pages. Requests *stand* on nodes: all from the root to where one stands is locked for it. What
nobody stands on or below may be evicted, least recently used first. The tree hands out pages and takes them in, and
never asks for one; what it does follows from the calls made and from nothing else.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from tpserve.tokens import ITEM

__all__ = ["Node", "RadixTree"]

STALE = 64
"""How many more than all leaves the heap may hold before it is made anew."""

TRIM = 16
"""Trimming an edge takes at least this part of it, for it copies the rest."""


class Node:
    """One edge of the tree and the node at its end.

    Attributes:
        key: the edge's ids, packed; whole pages.
        pages: the pages that hold them.
        parent: the node where the edge begins; the root is its own.
        children: by the first page of their keys.
        locks: how many requests stand here or below.
        stamp: when a request last left here or from below, in calls of :meth:`RadixTree.unlock`.
    """

    __slots__ = ("children", "key", "locks", "pages", "parent", "stamp")

    def __init__(self, key: bytes, pages: list[int], parent: Node | None, locks: int, stamp: int) -> None:
        self.key = key
        self.pages = pages
        self.parent: Node = parent or self
        self.children: dict[bytes, Node] = {}
        self.locks = locks
        self.stamp = stamp


class RadixTree:
    """Cached sequences, and who stands on them.

    The pages of one edge were always used together: a request that leaves an edge midway splits it, and a node on
    which nobody stands any more and which does not branch is joined with its child when a request next takes both. So
    one stamp an edge gives the order of eviction that a stamp a page would.

    Args:
        page_size: tokens a page.

    Attributes:
        root: where a request stands that has found nothing.
        page_bytes: the bytes of a page's ids.
        size: how many pages are in the tree.
        evictable: how many of them nobody stands on or below.
    """

    def __init__(self, page_size: int) -> None:
        # Locked more often than any other node, the root is never evicted, joined or lengthened.
        self.root = Node(b"", [], None, sys.maxsize, sys.maxsize)
        self.page_bytes = page_size * ITEM
        self.size = 0
        self.evictable = 0
        self._clock = 0
        self._leaves: dict[int, Node] = {}  # Those that may be evicted, by stamp; no two leaves have the same.
        self._heap: list[int] = []  # All their stamps, and some that are no leaf's any more.

    def peek(self, ids: bytes, node: Node | None = None) -> tuple[int, int]:
        """How many pages :meth:`match` would find from there, and how many of them are evictable; changes nothing."""
        node, pages, evictable = node or self.root, 0, 0
        while True:
            child, agreeing = self._child(node, ids, pages * self.page_bytes)
            if child is None:
                return pages, evictable
            pages += agreeing
            if not child.locks:
                evictable += agreeing
            if agreeing < len(child.pages):
                return pages, evictable
            node = child

    def match(self, ids: bytes) -> tuple[Node, list[int]]:
        """Stand at the end of the longest cached prefix of ``ids``: the node there, and all pages up to it."""
        node, pages = self._walk(self.root, ids)
        self._lock(node, self.root)
        return node, pages

    def follow(self, node: Node, ids: bytes) -> tuple[Node, list[int]]:
        """Go on from ``node``, where the caller stands, as far as ``ids`` are cached there.

        Returns:
            Where the caller now stands, and the pages on the way.
        """
        end, pages = self._walk(node, ids)
        self._lock(end, node)
        return end, pages

    def extend(self, node: Node, ids: bytes, pages: list[int]) -> Node:
        """Put ``ids`` below ``node``, where the caller stands and from where nothing of them can be followed.

        Args:
            node: where the caller stood.
            ids: the ids that follow there; whole pages, at least one.
            pages: the pages that hold them; the tree's from now on.

        Returns:
            Where the caller now stands.
        """
        assert len(ids) == len(pages) * self.page_bytes, f"{len(pages)} pages for {len(ids)} bytes of ids"
        self.size += len(pages)
        if node.locks == 1 and not node.children:
            node.key += ids
            node.pages += pages
            return node
        child = Node(ids, pages, node, 1, 0)
        node.children[ids[: self.page_bytes]] = child
        return child

    def unlock(self, node: Node) -> None:
        """Leave ``node``, where the caller stood."""
        assert node.locks, "a node left on which nobody stands"
        left = node
        self._clock += 1
        while node is not self.root:
            node.locks -= 1
            node.stamp = self._clock
            if not node.locks:
                self.evictable += len(node.pages)
            node = node.parent
        if not left.locks and not left.children:
            self._offer(left)

    def evict(self, count: int) -> list[int]:
        """Give up ``count`` pages or a few more, least recently used first; the caller has seen that there are as many.

        The end of an edge goes before its beginning, and no more of it than is wanted: whoever comes back for the end
        needs the beginning too.
        """
        assert count <= self.evictable, f"{count} pages wanted, {self.evictable} evictable"
        evicted: list[int] = []
        while len(evicted) < count:
            node = self._oldest()
            kept = len(node.pages) - max(count - len(evicted), len(node.pages) // TRIM)
            if kept > 0:
                evicted += node.pages[kept:]
                del node.pages[kept:]
                node.key = node.key[: kept * self.page_bytes]
            else:
                evicted += node.pages
                self._remove(node)
        self.size -= len(evicted)
        self.evictable -= len(evicted)
        return evicted

    # Ways through the tree.

    def _child(self, node: Node, ids: bytes, start: int) -> tuple[Node | None, int]:
        """The child that goes on as ``ids`` do from byte ``start``, and how many of its pages agree."""
        if not node.children:
            return None, 0
        child = node.children.get(ids[start : start + self.page_bytes])
        if child is None:
            return None, 0
        if ids.startswith(child.key, start):
            return child, len(child.pages)
        low, high = 1, len(child.pages) - 1
        while low < high:
            middle = (low + high + 1) // 2
            known = low * self.page_bytes
            if ids.startswith(child.key[known : middle * self.page_bytes], start + known):
                low = middle
            else:
                high = middle - 1
        return child, low

    def _walk(self, node: Node, ids: bytes) -> tuple[Node, list[int]]:
        """Follow ``ids`` from ``node`` as far as they are cached: the node there, and the pages on the way."""
        pages: list[int] = []
        while True:
            child, agreeing = self._child(node, ids, len(pages) * self.page_bytes)
            if child is None:
                return node, pages
            if agreeing < len(child.pages):
                child = self._split(child, agreeing)
            pages += child.pages
            if len(node.children) == 1 and node.locks == child.locks:
                self._join(node, child)
            node = child

    def _lock(self, node: Node, above: Node) -> None:
        """Let somebody who stands on ``above`` stand on ``node``, which is below it or the same."""
        if not node.locks and not node.children:
            del self._leaves[node.stamp]
        while node is not above:
            if not node.locks:
                self.evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    # Changes of its shape. The node on which somebody may stand stays the same object.

    def _split(self, lower: Node, count: int) -> Node:
        """Put a node after the first ``count`` pages of an edge."""
        cut, size = count * self.page_bytes, self.page_bytes
        upper = Node(lower.key[:cut], lower.pages[:count], lower.parent, lower.locks, lower.stamp)
        upper.parent.children[upper.key[:size]] = upper
        lower.key, lower.pages, lower.parent = lower.key[cut:], lower.pages[count:], upper
        upper.children[lower.key[:size]] = lower
        return upper

    def _join(self, upper: Node, lower: Node) -> None:
        """Take a node out that has but one child."""
        lower.key, lower.pages, lower.parent = upper.key + lower.key, upper.pages + lower.pages, upper.parent
        lower.parent.children[lower.key[: self.page_bytes]] = lower

    def _remove(self, leaf: Node) -> None:
        """Take the oldest leaf out; its parent may be one now."""
        del self._leaves[heappop(self._heap)]
        parent = leaf.parent
        del parent.children[leaf.key[: self.page_bytes]]
        if not parent.locks and not parent.children:
            self._offer(parent)

    # Leaves by age.

    def _offer(self, leaf: Node) -> None:
        self._leaves[leaf.stamp] = leaf
        heappush(self._heap, leaf.stamp)
        if len(self._heap) > 2 * len(self._leaves) + STALE:
            self._heap = sorted(self._leaves)

    def _oldest(self) -> Node:
        while self._heap[0] not in self._leaves:
            heappop(self._heap)
        return self._leaves[self._heap[0]]

    # Integrity.

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        waiting = [self.root]
        while waiting:
            children = waiting.pop().children.values()
            yield from children
            waiting += children

    def path(self, node: Node) -> list[int]:
        """All pages from the root to ``node``."""
        edges = []
        while node is not self.root:
            edges.append(node.pages)
            node = node.parent
        return [page for pages in reversed(edges) for page in pages]

    def check(self, standing: Iterable[Node]) -> None:
        """Assert that the tree is whole and that exactly those who stand on the nodes ``standing`` have locked it.

        Takes time for every node.
        """
        nodes = list(self.nodes())
        here = Counter(standing)
        assert here.keys() <= {self.root, *nodes}, "somebody stands on a node that is not in the tree"
        for node in nodes:
            assert node.pages, "a node has no pages"
            assert len(node.key) == len(node.pages) * self.page_bytes, "a key does not fill its pages"
            assert node.parent.children.get(node.key[: self.page_bytes]) is node, "a node is not where its key says"
            assert node.parent.stamp >= node.stamp, "a node was left later than its parent"
            below = sum(child.locks for child in node.children.values())
            assert node.locks == below + here[node], f"{node.locks} locks, {below} below and {here[node]} standing"
        size = sum(len(node.pages) for node in nodes)
        assert self.size == size, f"the tree counts {self.size} pages and has {size}"
        unlocked = [node for node in nodes if not node.locks]
        evictable = sum(len(node.pages) for node in unlocked)
        assert self.evictable == evictable, f"the tree counts {self.evictable} evictable pages and has {evictable}"
        leaves = [node for node in unlocked if not node.children]
        assert len(self._leaves) == len(leaves), "a leaf is listed that is none, or two were left at once"
        assert all(self._leaves.get(leaf.stamp) is leaf for leaf in leaves), "a leaf is not listed"
        assert self._leaves.keys() <= set(self._heap), "a leaf is not in the heap"
        in_order = (self._heap[(at - 1) // 2] <= self._heap[at] for at in range(1, len(self._heap)))
        assert all(in_order), "the heap is none: another leaf than the oldest may be evicted"
