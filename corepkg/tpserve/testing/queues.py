"""Queues for testing policies: random states, and a view that counts what is read of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from tpserve.api import Glimpse, Level, Limits, Plan, RunningRequest, WaitingRequest
from tpserve.scheduler.view import malformed

__all__ = ["CountingView", "QueueState", "fault", "long_queue", "random_state"]


class QueueState(msgspec.Struct, frozen=True):
    """What a policy is shown, as plain data.

    Attributes:
        round: the round that is planned.
        limits: what the plan must keep to.
        waiting: by arrival.
        running: by arrival.
        finishing: how many more requests run that await their last token.
    """

    round: int
    limits: Limits
    waiting: list[WaitingRequest]
    running: list[RunningRequest]
    finishing: int = 0

    @property
    def decoding(self) -> int:
        """How many of the running requests decode."""
        return sum(not request.pending for request in self.running)


class CountingView:
    """A :class:`~tpserve.api.QueueView` of a state; refuses to be written to, and counts what is read of it.

    Attributes:
        reads: how many waiting requests were read.
        looks: how many of them were looked up in the prefix cache.
    """

    __slots__ = ("_state", "looks", "reads")

    _state: QueueState
    looks: int
    reads: int

    def __init__(self, state: QueueState) -> None:
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "looks", 0)
        object.__setattr__(self, "reads", 0)

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"a policy must not write to its view, and set {name!r}")

    @property
    def round(self) -> int:
        """The round that is planned."""
        return self._state.round

    @property
    def limits(self) -> Limits:
        """What the plan must keep to."""
        return self._state.limits

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""
        return len(self._state.waiting)

    @property
    def num_running(self) -> int:
        """How many requests hold pages."""
        return len(self._state.running) + self._state.finishing

    @property
    def num_decoding(self) -> int:
        """How many of those decode."""
        return self._state.decoding

    @property
    def levels(self) -> Sequence[Level]:
        """Those that wait by priority, largest first."""
        firsts = {request.priority: request for request in reversed(self._state.waiting)}
        return [Level(priority, firsts[priority].since, firsts[priority].arrival) for priority in sorted(firsts)[::-1]]

    def waiting(self, priority: int | None = None) -> Iterator[WaitingRequest]:
        """Requests without pages, all or those of one priority, by arrival; lazy."""
        for request in self._read(priority):
            self._count("looks")
            yield request

    def glimpses(self, priority: int | None = None) -> Iterator[Glimpse]:
        """Requests without pages, as ``waiting`` gives them, without a look into the prefix cache; lazy."""
        for each in self._read(priority):
            yield Glimpse(each.uid, each.arrival, each.since, each.priority, each.cached, seen=each.uid % 5 - 1)

    def look(self, uid: int) -> WaitingRequest:
        """The waiting request of this uid."""
        for request in self._state.waiting:
            if request.uid == uid:
                self._count("looks")
                return request
        raise KeyError(uid)

    def running(self) -> Iterator[RunningRequest]:
        """Requests with pages, by arrival; lazy."""
        yield from self._state.running

    def _read(self, priority: int | None) -> Iterator[WaitingRequest]:
        for request in self._state.waiting:
            if priority in {None, request.priority}:
                self._count("reads")
                yield request

    def _count(self, name: str) -> None:
        object.__setattr__(self, name, getattr(self, name) + 1)


def random_state(draw: random.Random) -> QueueState:
    """A state that a scheduler can be in: what waits would fit alone.

    In every other one those that wait have come a moment ago, and many of them are alike.
    """
    page_size = draw.choice([1, 4, 16, 64])
    tokens = draw.choice([8, 64, 512, 8192])
    rows = draw.randint(1, min(tokens, 40))
    now, alike = draw.randint(0, 5000), draw.random() < 0.5
    come = range(max(0, now - 3) if alike else 0, now + 1)
    sizes = [_random_size(draw, tokens) for _ in range(3 if alike else 100)]
    arrivals = iter(sorted(draw.sample(range(1000), 100)))
    running = [_random_running(draw, next(arrivals), now, tokens) for _ in range(draw.randint(0, rows))]
    length = draw.choice([0, 1, 3, 20, 60]) if running else draw.choice([1, 3, 20, 60])
    waiting = [_random_waiting(draw, next(arrivals), come, sizes, page_size) for _ in range(length)]
    waiting.sort(key=lambda request: request.since)
    least = 0 if running else max(request.pages + request.promised for request in waiting)
    limits = Limits(
        tokens=tokens,
        chunk=draw.choice([1, 7, tokens, tokens]),
        running=rows,
        free_pages=least + draw.choice([0, 1, 10, 1000]),
        promised_pages=draw.choice([0, 5, 100]) if running else 0,
    )
    finishing = draw.randint(0, min(2, rows - len(running)))
    return QueueState(now, limits, _renumbered(waiting), running, finishing)


def long_queue(length: int) -> QueueState:
    """Many requests that wait, of which few can run."""
    waiting = [
        WaitingRequest(number, number, number // 10, number % 5, cached=0, tokens=100, pages=7, promised=3)
        for number in range(length)
    ]
    return QueueState(length, Limits(1000, 1000, running=64, free_pages=500, promised_pages=0), waiting, [])


def fault(plan: Plan, state: QueueState) -> str | None:
    """Where a plan breaks the rules; None for a good one."""
    wrong = malformed(plan)
    if wrong:
        expected, found = wrong
        return f"plans {found}, not {expected}"
    limits = state.limits
    waiting = {request.uid: request for request in state.waiting}
    pending = {request.uid: request.tokens for request in state.waiting}
    pending |= {request.uid: request.pending for request in state.running}
    planned = [prefill.uid for prefill in plan.prefill]
    if len(set(planned)) < len(planned) or not pending.keys() >= set(planned):
        return f"plans {planned}, not living requests, each once"
    for prefill in plan.prefill:
        most = min(pending[prefill.uid], limits.chunk)
        if not 0 < prefill.tokens <= most:
            return f"plans {prefill.tokens} tokens of a request of which {most} can be computed"
    admitted = [waiting[uid] for uid in planned if uid in waiting]
    rows = len(state.running) + state.finishing + len(admitted)
    if rows > limits.running:
        return f"lets {rows} requests run, of at most {limits.running}"
    pages = sum(request.pages for request in admitted)
    if pages > limits.free_pages:
        return f"takes {pages} pages, of {limits.free_pages} that are free"
    prompts = sum(prefill.tokens for prefill in plan.prefill)
    decodes = state.decoding if plan.decode else 0
    if prompts + decodes > limits.tokens:
        return f"computes {prompts + decodes} tokens, of at most {limits.tokens}"
    if not prompts + decodes and not state.finishing:
        return f"computes nothing, with {len(pending)} requests there"
    return None


def _renumbered(waiting: list[WaitingRequest]) -> list[WaitingRequest]:
    """The same requests with arrivals in their order."""
    arrivals = sorted(request.arrival for request in waiting)
    return [
        msgspec.structs.replace(request, arrival=arrival) for request, arrival in zip(waiting, arrivals, strict=True)
    ]


def _random_size(draw: random.Random, tokens: int) -> int:
    return draw.randint(1, draw.choice([2, 10, tokens, 2 * tokens]))


def _random_waiting(
    draw: random.Random, arrival: int, come: Sequence[int], sizes: Sequence[int], page_size: int
) -> WaitingRequest:
    known, cached = draw.choice(sizes), 0
    if draw.random() < 0.3:
        cached = draw.randrange(0, known, page_size)
    held = -(-known // page_size) - draw.choice([0, cached // page_size])
    promised = draw.choice([0, 1, 50, 1000]) // page_size
    since, priority = draw.choice(come), draw.choice([0, 0, 0, 5, -1])
    return WaitingRequest(draw.getrandbits(48), arrival, since, priority, cached, known - cached, held, promised)


def _random_running(draw: random.Random, arrival: int, now: int, tokens: int) -> RunningRequest:
    known = _random_size(draw, tokens)
    pending = draw.choice([0, 0, 0, draw.randint(1, known)])
    length = known - pending if pending else known + draw.randint(0, 100)
    since = now * arrival // 1000
    return RunningRequest(draw.getrandbits(48), arrival, draw.choice([0, 0, 0, 5, -1]), length, pending, since)
