"""What running requests hold: a row of the engine's tables each, and pages of the KV pool."""

from __future__ import annotations

from collections.abc import Collection

from tpserve.kv.allocator import SlotAllocator
from tpserve.kv.pool import KvPool
from tpserve.scheduler.queues import NO_SLOT, Request
from tpserve.step import EngineLimits

__all__ = ["Capacity"]


class Capacity:
    """Gives rows and pages, and takes them back.

    Steps are computed in the order in which they are launched. So a page counts as filled from the moment that the step
    which fills it is made up, and may be given to another as soon as its request has ended, whatever is under way.

    Args:
        limits: how much there is.
        cache: whether computed pages are kept for others.

    Attributes:
        pool: the pages.
        promised: how many more pages the running requests may yet come to take.
    """

    def __init__(self, limits: EngineLimits, *, cache: bool) -> None:
        self.pool = KvPool(limits.pages, limits.page_size, cache=cache)
        self.promised = 0
        self._slots = SlotAllocator(limits.slots)
        self._page_size = limits.page_size

    @property
    def available(self) -> int:
        """How many pages can be given."""
        return self.pool.available

    def pages(self, tokens: int) -> int:
        """How many pages so many tokens take."""
        return -(-tokens // self._page_size)

    def peek(self, request: Request) -> tuple[int, int]:
        """For a waiting request: how many of its tokens are cached, and how many pages admitting it would take."""
        version, cached, pages = request.peeked
        if version != self.pool.version:
            cached, taken = self.pool.peek(request.tokens.tobytes())
            pages = self.pages(len(request.tokens)) - cached // self._page_size + taken
            request.peeked = (self.pool.version, cached, pages)
        return cached, pages

    def admit(self, request: Request) -> None:
        """Give a waiting request a row, and pages for all its tokens; what is cached is computed already."""
        request.known = len(request.tokens)
        request.slot = self._slots.alloc()
        request.holding = holding = self.pool.admit(request.tokens.tobytes())
        request.length = holding.shared * self._page_size
        held = self.pages(request.known)
        self.pool.grow(holding, held - holding.shared)
        request.room = held * self._page_size
        self.promised += self.pages(request.reserve) - held

    def grow(self, request: Request) -> int:
        """Give a running request one more page: this. The caller has seen that one is available."""
        assert request.holding is not None
        (page,) = self.pool.grow(request.holding, 1)
        request.room += self._page_size
        self.promised -= 1
        return page

    def catch_up(self, request: Request) -> range:
        """Let a request that is still being prefilled skip what others have computed meanwhile.

        Returns:
            Which of its pages are others now.
        """
        assert request.holding is not None
        swapped = self.pool.catch_up(request.holding, request.tokens[: request.known].tobytes(), request.length)
        if swapped:
            request.length = swapped.stop * self._page_size
        return swapped

    def share(self, request: Request) -> None:
        """Let others find what a request has computed."""
        assert request.holding is not None
        self.pool.share(request.holding, request.tokens[: request.length].tobytes())

    def release(self, request: Request) -> None:
        """Take back row and pages; what was computed stays in the cache."""
        assert request.holding is not None
        self.promised -= self.pages(request.reserve) - len(request.holding.pages)
        self.pool.release(request.holding, request.tokens[: request.length].tobytes())
        self._slots.free(request.slot)
        request.slot, request.holding = NO_SLOT, None
        request.known = request.length = request.room = 0

    def check_counts(self, running: Collection[Request]) -> None:
        """Assert that the numbers of pages free, cached and held by ``running`` add up."""
        self.pool.check_counts([request.holding for request in running if request.holding is not None])

    def check(self, running: Collection[Request]) -> None:
        """Assert that every row and every page is free, cached, or held by one of ``running``; takes a while."""
        holdings = [request.holding for request in running if request.holding is not None]
        self.pool.check(holdings)
        self._slots.check(request.slot for request in running)
        promised = sum(self.pages(request.reserve) - request.room // self._page_size for request in running)
        assert self.promised == promised, f"{self.promised} pages promised, {promised} expected"
        rooms = [len(holding.pages) * self._page_size for holding in holdings]
        assert rooms == [request.room for request in running], "a request's pages have not the room that it counts on"
