"""What a policy sees of the queues, and the check that its plan may be carried out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpserve.api.policy import Glimpse, Level, Limits, Plan, Prefill, RunningRequest, WaitingRequest
from tpserve.scheduler.capacity import Capacity
from tpserve.scheduler.queues import Queues, Request

__all__ = ["View", "breach", "malformed", "shown"]


class View:
    """The queues as a policy sees them; a :class:`tpserve.api.policy.QueueView`."""

    def __init__(self, queues: Queues, capacity: Capacity, limits: Limits, round: int) -> None:
        self._queues = queues
        self._capacity = capacity
        self._limits = limits
        self._round = round

    @property
    def round(self) -> int:
        """The round that is planned."""
        return self._round

    @property
    def limits(self) -> Limits:
        """What the plan must keep to."""
        return self._limits

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""
        return self._queues.num_waiting

    @property
    def num_running(self) -> int:
        """How many requests hold pages."""
        return len(self._queues.running)

    @property
    def num_decoding(self) -> int:
        """How many of the running requests decode."""
        return len(self._queues.decoding)

    @property
    def levels(self) -> Sequence[Level]:
        """Those that wait by priority, largest first."""
        return self._queues.levels.copy()

    def waiting(self, priority: int | None = None) -> Iterator[WaitingRequest]:
        """Requests without pages, all or those of one priority, by arrival; lazy."""
        return map(self._show, self._queues.waiting(priority))

    def glimpses(self, priority: int | None = None) -> Iterator[Glimpse]:
        """Requests without pages, as ``waiting`` gives them, without a look into the prefix cache; lazy."""
        return map(_glimpse, self._queues.waiting(priority))

    def look(self, uid: int) -> WaitingRequest:
        """The waiting request of this uid as it is now."""
        request = self._queues.get_waiting(uid)
        if request is None:
            raise KeyError(uid)
        return self._show(request)

    def running(self) -> Iterator[RunningRequest]:
        """Requests with pages, by arrival; lazy."""
        return map(shown, sorted(self._queues.running.values(), key=_arrival))

    def _show(self, request: Request) -> WaitingRequest:
        known = len(request.tokens)
        cached, pages = self._capacity.peek(request)
        promised = self._capacity.pages(request.reserve) - self._capacity.pages(known)
        return WaitingRequest(
            request.uid, request.arrival, request.since, request.priority, cached, known - cached, pages, promised
        )


def shown(request: Request) -> RunningRequest:
    """A running request as a policy sees it."""
    return RunningRequest(
        request.uid, request.arrival, request.priority, request.length, request.pending, request.since
    )


def malformed(plan: object) -> tuple[str, str] | None:
    """What was expected and what was found instead, where something is no plan at all: policies are others' code."""
    if type(plan) is not Plan:
        return "a Plan", repr(plan)
    if type(plan.prefill) is not tuple:
        return "a tuple of prefills", repr(plan.prefill)
    for each in plan.prefill:
        if type(each) is not Prefill or type(each.uid) is not int or type(each.tokens) is not int:
            return "prefills of two integers", repr(each)
    if type(plan.decode) is not bool:
        return "decode to be True or False", repr(plan.decode)
    return None


def breach(plan: Plan, queues: Queues, capacity: Capacity, limits: Limits) -> tuple[str, str] | None:
    """Where a plan cannot be carried out: what was expected, and what was found; None for a good plan."""
    wrong = malformed(plan)
    if wrong:
        return wrong
    seen: set[int] = set()
    rows, pages, prompts = limits.running - len(queues.running), limits.free_pages, 0
    for prefill in plan.prefill:
        uid, request = prefill.uid, queues.running.get(prefill.uid)
        if request is None:
            request = queues.get_waiting(uid)
            if request is None:
                return "living requests", f"request {uid}"
            cached, needed = capacity.peek(request)
            pending = len(request.tokens) - cached
            rows -= 1
            pages -= needed
        else:
            pending = request.pending
        if uid in seen:
            return "each request once", f"request {uid} twice"
        most = min(pending, limits.chunk)
        if not 0 < prefill.tokens <= most:
            return f"1 to {most} tokens of request {uid}", str(prefill.tokens)
        prompts += prefill.tokens
        seen.add(uid)
    if rows < 0:
        return f"at most {limits.running} running requests", str(limits.running - rows)
    if pages < 0:
        return f"at most {limits.free_pages} pages", str(limits.free_pages - pages)
    decodes = len(queues.decoding) if plan.decode else 0
    if prompts + decodes > limits.tokens:
        return f"at most {limits.tokens} tokens", str(prompts + decodes)
    if not prompts + decodes and not queues.has_ending:
        return f"something to compute for {len(queues)} requests", "nothing"
    return None


def _glimpse(request: Request) -> Glimpse:
    seen, cached, _ = request.peeked
    return Glimpse(request.uid, request.arrival, request.since, request.priority, cached, seen)


def _arrival(request: Request) -> int:
    return request.arrival
