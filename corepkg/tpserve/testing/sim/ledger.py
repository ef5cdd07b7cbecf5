"""What a leader must have cached, and how much it may take: kept beside it, from what it is seen to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tpserve.kv.pool import KvPool
from tpserve.messages import StepOutput
from tpserve.policies.lpm import LOOKS
from tpserve.policies.options import LpmOptions
from tpserve.scheduler.queues import Request
from tpserve.scheduler.scheduler import Scheduler
from tpserve.step import Step
from tpserve.testing.fake_engine import FakeEngine
from tpserve.testing.sim.clients import Failure
from tpserve.testing.sim.scenario import Scenario
from tpserve.tokens import ITEM

__all__ = ["Ledger"]

SHARE = 256
"""An eviction may give up this part of the pool, however little is wanted."""
TRIM = 16
"""And this part of an edge."""


class Ledger:
    """A second account of the cache, by the token prefix that each page ends.

    *What is cached*: each whole page that a step of a prompt has computed, and of a request that gives its pages up, or
    ends, each that it has computed; until it is evicted. *Admission*: a prompt is computed from the end of its longest
    prefix that is cached, and the client is told of that many tokens. *Eviction*: no more than is wanted, or a part of
    the pool or of an edge. *Retraction*: only while a page is wanted and none can be had. *Limits*: no more run, and no
    more is taken in a round, than the leader was told. ``lpm``: who has most cached comes first.

    Args:
        scenario: what the leader was told.
        scheduler: the leader's; watched from now on.
        engine: its engine.
    """

    def __init__(self, scenario: Scenario, scheduler: Scheduler, engine: FakeEngine) -> None:
        budget, limits = scenario.budget, scenario.limits
        self._queues = scheduler.queues
        self._pool: KvPool = scheduler.capacity.pool
        self._rows = engine._rows
        self._keeps = budget.cache
        self._page = limits.page_size
        self._bytes = limits.page_size * ITEM
        self._most_running = min(budget.running, budget.step_tokens, limits.slots)
        self._caps = scenario.caps
        self._lpm = scenario.options if isinstance(scenario.options, LpmOptions) else None
        self._at_least = limits.pages // SHARE
        self._more = limits.max_context // limits.page_size // TRIM
        self._cached: dict[bytes, int] = {}
        self._ends: dict[int, bytes] = {}
        self._gone: set[bytes] = set()
        self._begun: dict[int, int] = {}
        self._done = [0, 0, 0, 0]
        self._told = [0, 0, 0, 0]
        _watch(engine, "launch", self._launch)
        _watch(self._pool, "grow", self._grow)
        _watch(self._pool._tree, "evict", self._evict)
        _watch(scheduler.capacity, "release", self._release)

    def hear(self, output: StepOutput) -> None:
        """Look at what clients are told."""
        for started in output.started:
            cached = min(self._begun.pop(started.uid), started.prompt_tokens)
            if started.cached_tokens != cached:
                raise Failure(f"request {started.uid} is told of {started.cached_tokens} cached tokens, not {cached}")
        if output.pool:
            news = output.pool
            for index, number in enumerate((news.retractions, news.looked_up, news.found, news.evicted)):
                self._told[index] += number

    def check(self, taken: list[int]) -> None:
        """Look at a round that is over.

        Args:
            taken: the sizes of the frames that the leader took in it.
        """
        self._gone.clear()
        if self._pool._tree.size != len(self._cached):
            self.check_everything()
        if taken:
            if len(taken) > self._caps.messages:
                raise Failure(f"{len(taken)} messages in a round, of at most {self._caps.messages}")
            if sum(taken[:-1]) >= self._caps.bytes:
                raise Failure(f"a message is taken after {sum(taken[:-1])} bytes, the most being {self._caps.bytes}")

    def check_everything(self) -> None:
        """Hold all that is cached to this account; takes time for every page."""
        found = dict(_ends(self._pool))
        if found != self._cached:
            lost, more = len(self._cached.keys() - found.keys()), len(found.keys() - self._cached.keys())
            raise Failure(f"{lost} pages are not in the cache that should be, {more} should not, or they are others")

    def check_reports(self) -> None:
        """Hold what was told of the pool to what has happened, once all is over."""
        if self._told != self._done:
            raise Failure(f"retractions, tokens looked up and found, evictions: told {self._told}, are {self._done}")

    # What the leader does.

    def _launch(self, launch: Callable[[Step], Any], step: Step) -> Any:
        running = self._queues.running
        if len(running) > self._most_running:
            raise Failure(f"{len(running)} requests run, of at most {self._most_running}")
        by_slot = {request.slot: request for request in running.values()}
        if step.sequences[0].start < by_slot[step.sequences[0].slot].known:  # Prompts come first in a batch.
            self._look_at_prompts(step, by_slot)
        return launch(step)

    def _look_at_prompts(self, step: Step, by_slot: dict[int, Request]) -> None:
        fresh = {write.slot for write in step.tokens}
        if self._lpm and fresh:
            self._check_merit([by_slot[slot] for slot in fresh], self._lpm)
        for sequence in step.sequences:
            request, start = by_slot[sequence.slot], sequence.start
            if start >= request.known:
                continue
            ids = request.tokens[: request.known].tobytes()
            found = self._longest(ids)
            row = self._rows[sequence.slot]
            if sequence.slot in fresh:
                self._begun.setdefault(request.uid, start)
                self._done[1] += request.known
                self._done[2] += start
            elif row and row.computed:
                found = max(found, row.computed)
            if start != found:
                raise Failure(f"request {request.uid} is computed from {start} on, and {found} tokens are there")
            self._insert(request, ids, start // self._page, sequence.end // self._page)

    def _check_merit(self, admitted: list[Request], options: LpmOptions) -> None:
        """Whoever waits must not come before one who is admitted, as far as all were looked up in this round."""
        waiting = [*self._queues.waiting()]
        if not waiting or len(admitted) + len(waiting) > min(options.window, LOOKS):
            return

        def place(request: Request) -> tuple[int, int]:
            cached = self._longest(request.tokens.tobytes(), self._gone)
            return options.ageing * request.since - cached, request.arrival

        last, first = max(admitted, key=place), min(waiting, key=place)
        if place(last) > place(first):
            raise Failure(f"request {last.uid} is admitted while {first.uid} waits, which has so much more cached")

    def _grow(self, grow: Callable[..., list[int]], holding: Any, count: int) -> list[int]:
        wanted, size = count - self._pool._pages.free_count, self._pool._tree.size
        pages = grow(holding, count)
        evicted = size - self._pool._tree.size
        if evicted and evicted > max(wanted, self._at_least) + self._more * (wanted > 0):
            raise Failure(f"{evicted} pages are evicted, and {wanted} were wanted")
        return pages

    def _evict(self, evict: Callable[[int], list[int]], count: int) -> list[int]:
        pages = evict(count)
        self._done[3] += len(pages)
        for page in pages:
            end = self._ends.pop(page, None)
            if end is None:
                raise Failure(f"page {page} is evicted and was not cached")
            del self._cached[end]
            self._gone.add(end)
        return pages

    def _release(self, release: Callable[[Request], None], request: Request) -> None:
        if not request.has_ended:
            self._check_retraction()
        row = self._rows[request.slot]
        computed = row.computed or 0 if row else 0
        self._insert(request, request.tokens[:computed].tobytes(), 0, computed // self._page)
        release(request)

    def _check_retraction(self) -> None:
        queues = self._queues
        self._done[0] += 1
        if self._pool.available:
            raise Failure(f"a request has to give its pages up, and {self._pool.available} can be had")
        if not any(each.length == each.room for each in queues.decoding.values()):
            raise Failure("a request has to give its pages up, and nobody wants any")

    # The account.

    def _longest(self, ids: bytes, more: Iterable[bytes] = ()) -> int:
        """How many of these tokens, short of the last, are cached, or were until this round."""
        end, most = self._bytes, len(ids) - ITEM
        while end <= most and (ids[:end] in self._cached or ids[:end] in more):
            end += self._bytes
        return end // ITEM - self._page

    def _insert(self, request: Request, ids: bytes, first: int, behind: int) -> None:
        """Note that a request's pages from ``first`` to before ``behind`` are cached, where no other's are."""
        if not self._keeps or not request.holding:
            return
        for index in range(first, behind):
            end = ids[: (index + 1) * self._bytes]
            if end not in self._cached:
                page = request.holding.pages[index]
                self._cached[end] = page
                self._ends[page] = end


def _watch(owner: object, name: str, seen: Callable[..., Any]) -> None:
    """Have ``seen`` called instead of a method of one object; it gets the method first."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *args: seen(method, *args))


def _ends(pool: KvPool) -> Iterable[tuple[bytes, int]]:
    """Every cached page, by the prefix that it ends."""
    tree = pool._tree
    waiting = [(tree.root, b"")]
    while waiting:
        node, before = waiting.pop()
        for child in node.children.values():
            ids = before + child.key
            size = len(child.pages)
            for index, page in enumerate(child.pages):
                yield ids[: len(ids) - (size - 1 - index) * tree.page_bytes], page
            waiting.append((child, ids))
