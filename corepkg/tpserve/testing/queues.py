"""Queues for testing policies: random states, a view that counts what is read of it, and a simulation of rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec

from tpserve.api import Limits, Plan, Policy, RunningRequest, WaitingRequest

__all__ = ["CountingView", "QueueState", "Simulation", "fault", "long_queue", "random_state"]


class QueueState(msgspec.Struct, frozen=True):
    """What a policy is shown, as plain data.

    Attributes:
        limits: what the plan must keep to.
        waiting: by arrival.
        running: by arrival.
    """

    limits: Limits
    waiting: list[WaitingRequest]
    running: list[RunningRequest]


class CountingView:
    """A :class:`~tpserve.api.QueueView` of a state; refuses to be written to, and counts what is read of it.

    Attributes:
        reads: how many waiting requests were read.
    """

    __slots__ = ("_state", "reads")

    _state: QueueState
    reads: int

    def __init__(self, state: QueueState) -> None:
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "reads", 0)

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"a policy must not write to its view, and set {name!r}")

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
        return len(self._state.running)

    @property
    def num_decoding(self) -> int:
        """How many of those decode."""
        return sum(not request.pending for request in self._state.running)

    def waiting(self) -> Iterator[WaitingRequest]:
        """Requests without pages, by arrival; lazy."""
        for request in self._state.waiting:
            object.__setattr__(self, "reads", self.reads + 1)
            yield request

    def running(self) -> Iterator[RunningRequest]:
        """Requests with pages, by arrival; lazy."""
        yield from self._state.running


def random_state(draw: random.Random) -> QueueState:
    """A state that a scheduler can be in: what runs fits, and what waits would fit alone."""
    page_size = draw.choice([1, 4, 16, 64])
    tokens = draw.choice([8, 64, 512, 8192])
    rows = draw.randint(1, min(tokens, 40))
    arrivals = iter(sorted(draw.sample(range(1000), 100)))
    running = [_random_running(draw, next(arrivals), tokens) for _ in range(draw.randint(0, rows))]
    waiting = [_random_waiting(draw, next(arrivals), tokens) for _ in range(draw.choice([0, 1, 3, 20, 60]))]
    if not running and not waiting:
        waiting = [_random_waiting(draw, next(arrivals), tokens)]
    plain = Limits(tokens, rows, 0, page_size)
    held = sum(plain.pages(request.reserve) for request in running)
    pool = max([held, *(plain.pages(request.reserve) for request in waiting)]) + draw.choice([0, 1, 10, 1000])
    return QueueState(msgspec.structs.replace(plain, free_pages=pool - held), waiting, running)


def long_queue(length: int) -> QueueState:
    """Many requests that wait, of which few can run."""
    waiting = [WaitingRequest(number, number, 100, 150, priority=0) for number in range(length)]
    return QueueState(Limits(tokens=1000, running=64, free_pages=500, page_size=16), waiting, [])


def fault(plan: Plan, state: QueueState) -> str | None:
    """Where a plan breaks the rules; None for a good one."""
    limits = state.limits
    waiting = {request.uid: request for request in state.waiting}
    pending = {request.uid: request.tokens for request in state.waiting}
    pending |= {request.uid: request.pending for request in state.running}
    planned = [prefill.uid for prefill in plan.prefill]
    if len(set(planned)) < len(planned) or not pending.keys() >= set(planned):
        return f"plans {planned}, not living requests, each once"
    for prefill in plan.prefill:
        if not 0 < prefill.tokens <= pending[prefill.uid]:
            return f"plans {prefill.tokens} tokens of a request that has {pending[prefill.uid]} to compute"
    admitted = [waiting[uid] for uid in planned if uid in waiting]
    rows = len(state.running) + len(admitted)
    if rows > limits.running:
        return f"lets {rows} requests run, of at most {limits.running}"
    pages = sum(limits.pages(request.reserve) for request in admitted)
    if pages > limits.free_pages:
        return f"takes {pages} pages, of {limits.free_pages} that are free"
    prompts = sum(prefill.tokens for prefill in plan.prefill)
    decodes = sum(not request.pending for request in state.running) if plan.decode else 0
    if prompts + decodes > limits.tokens and not (len(planned) == 1 and not decodes):
        return f"computes {prompts + decodes} tokens, of at most {limits.tokens}"
    if not prompts + decodes:
        return f"computes nothing, with {len(pending)} requests there"
    return None


class Simulation:
    """A scheduler without an engine: carries out a policy's plans, one round at a time.

    Args:
        policy: decides.
        limits: with all pages free.
        backlog: so many requests wait at any time; new ones arrive when there are fewer.
        arrive: draws a new request's prompt tokens and output tokens.
    """

    def __init__(self, policy: Policy, limits: Limits, backlog: int, arrive: Callable[[], tuple[int, int]]) -> None:
        self._policy = policy
        self._limits = limits
        self._backlog = backlog
        self._arrive = arrive
        self._arrivals = 0
        self._waiting: dict[int, WaitingRequest] = {}
        self._running: dict[int, RunningRequest] = {}

    def add(self, tokens: int, output: int) -> int:
        """Let a request wait; its uid."""
        uid = self._arrivals
        self._arrivals += 1
        self._waiting[uid] = WaitingRequest(uid, uid, tokens, tokens + output - 1, priority=0)
        return uid

    def lives(self, uid: int) -> bool:
        """Whether a request has not finished yet."""
        return uid in self._waiting or uid in self._running

    def round(self) -> None:
        """Let new requests arrive, plan, and carry the plan out."""
        while len(self._waiting) < self._backlog:
            self.add(*self._arrive())
        state = self._state()
        plan = self._policy.plan(CountingView(state))
        assert fault(plan, state) is None, f"in a simulation the policy {fault(plan, state)}"
        decoding = [request for request in state.running if not request.pending] if plan.decode else []
        for prefill in plan.prefill:
            self._compute(self._running.get(prefill.uid) or self._admit(prefill.uid), prefill.tokens)
        for request in decoding:
            self._compute(request, 1)

    def _state(self) -> QueueState:
        running = sorted(self._running.values(), key=lambda request: request.arrival)
        held = sum(self._limits.pages(request.reserve) for request in running)
        limits = msgspec.structs.replace(self._limits, free_pages=self._limits.free_pages - held)
        return QueueState(limits, list(self._waiting.values()), running)

    def _admit(self, uid: int) -> RunningRequest:
        request = self._waiting.pop(uid)
        return RunningRequest(uid, request.arrival, 0, request.tokens, request.reserve, request.priority)

    def _compute(self, request: RunningRequest, tokens: int) -> None:
        """Advance a request; it has drawn its last token when all that it can ever hold is computed."""
        length, pending = request.length + tokens, max(0, request.pending - tokens)
        if length == request.reserve:
            self._running.pop(request.uid, None)
        else:
            self._running[request.uid] = msgspec.structs.replace(request, length=length, pending=pending)


def _random_waiting(draw: random.Random, arrival: int, tokens: int) -> WaitingRequest:
    prompt, reserve = _random_lengths(draw, tokens)
    return WaitingRequest(draw.getrandbits(48), arrival, prompt, reserve, draw.choice([0, 0, 0, 5, -1]))


def _random_running(draw: random.Random, arrival: int, tokens: int) -> RunningRequest:
    prompt, reserve = _random_lengths(draw, tokens)
    pending = draw.choice([0, 0, 0, draw.randint(1, prompt)])
    reserve = max(reserve, prompt + 1)
    length = prompt - pending if pending else draw.randint(prompt, reserve - 1)
    return RunningRequest(draw.getrandbits(48), arrival, length, pending, reserve, draw.choice([0, 0, 0, 5, -1]))


def _random_lengths(draw: random.Random, tokens: int) -> tuple[int, int]:
    """A prompt's tokens, now and then more than a step may compute, and all that may become of it."""
    prompt = draw.randint(1, draw.choice([2, 10, tokens, 2 * tokens]))
    return prompt, prompt + draw.choice([0, 1, 50, 1000])
