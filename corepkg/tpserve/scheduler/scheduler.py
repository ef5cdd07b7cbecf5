"""The scheduler: the loop that every rank runs.

All that it decides follows from the messages of the rounds and the tokens that the engine draws, so ranks that get the
same rounds decide the same.

With *overlap*, a round is decided while the step of the round before is still computed: the token that a request draws
there is on the device already when the next step reads it, and its number is read afterwards. What was decided for a
request that turns out to have finished is computed and thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from tpserve.api.policy import Limits, Plan, Policy, Prefill
from tpserve.errors import RankError
from tpserve.messages import Abort, FinishReason, Generate, RankMessage, Shutdown
from tpserve.scheduler.batch import NO_TOKEN, Batch
from tpserve.scheduler.capacity import Capacity
from tpserve.scheduler.digest import DecisionLog, RoundDecisions
from tpserve.scheduler.queues import NO_SLOT, Queues, Request, Tombstones
from tpserve.scheduler.replies import ReplySink
from tpserve.scheduler.round import Round, RoundSource
from tpserve.scheduler.tally import PoolTally
from tpserve.scheduler.view import View, breach, shown
from tpserve.step import Engine, Pending

__all__ = ["Budget", "Scheduler"]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler is told to keep to. The ranges are checked where one is decoded.

    Attributes:
        running: the most requests that hold pages at a time.
        step_tokens: the most tokens that one step computes.
        chunk: the most tokens of one prompt that one step computes; 0: as many as a step may.
        cache: whether computed pages are kept for others.
        overlap: whether a round is decided while the one before is computed.
    """

    running: Annotated[int, Meta(ge=1)] = 256
    step_tokens: Annotated[int, Meta(ge=1)] = 8192
    chunk: Annotated[int, Meta(ge=0)] = 0
    cache: bool = True
    overlap: bool = False


class Launched(msgspec.Struct, eq=False):
    """A batch under way; nothing is pending if it computes nothing."""

    arrived: Round
    batch: Batch
    pending: Pending | None = None


class Scheduler:
    """One rank's scheduler.

    Args:
        source: where the rounds come from.
        replies: where outputs go.
        engine: computes the steps.
        policy: decides what is computed next.
        log: gets the decisions of every round.
        budget: what to keep to.
        shutdowns: how many Shutdown messages end the run: one from each tokenizer.
        observe: called with each round and its decisions, after it was answered and folded into the log.

    Attributes:
        queues: the living requests; for others to look at.
        capacity: what the running ones hold; likewise.
    """

    def __init__(
        self,
        source: RoundSource,
        replies: ReplySink,
        engine: Engine,
        policy: Policy,
        log: DecisionLog,
        budget: Budget,
        shutdowns: int = 1,
        observe: Callable[[Round, RoundDecisions], None] | None = None,
    ) -> None:
        self._source = source
        self._replies = replies
        self._engine = engine
        self._policy = policy
        self._policy_name = type(policy).__qualname__
        self._log = log
        self._step_tokens = budget.step_tokens
        self._chunk = min(budget.chunk or budget.step_tokens, budget.step_tokens)
        self._depth = int(budget.overlap)
        self._limits = engine.limits
        self._max_running = min(budget.running, budget.step_tokens, self._limits.slots)
        self._shutdowns_to_come = shutdowns
        self._observe = observe
        self._arrivals = 0
        self.queues = Queues()
        self._tombstones = Tombstones()
        self.capacity = Capacity(self._limits, cache=budget.cache)
        self._tally = PoolTally(self.capacity.pool)
        self._under_way: deque[Launched] = deque()

    def run(self) -> None:
        """Serve round after round, until told to stop.

        Raises:
            RankError: this rank cannot go on: a link failed, ranks diverged, or the policy broke its limits.
        """
        while self.serve_round():
            pass

    def serve_round(self) -> bool:
        """Serve one round; whether there is another.

        Raises:
            RankError: as for :meth:`run`.
        """
        arrived = self._receive()
        self._launch(arrived, self._decide(arrived))
        goes_on = self._shutdowns_to_come > 0
        self._finish(leaving=self._depth if goes_on else 0)
        if not goes_on:
            self._replies.shutdown()
        return goes_on

    def check(self) -> None:
        """Assert that every page and every row is free, cached, or held by exactly one running request."""
        self.capacity.check(self.queues.running.values())

    def dump(self, path: Path) -> None:
        """Write the decisions of the last rounds to a file, those of unfinished ones included; from any thread."""
        self._log.dump(path, {each.batch.round: each.batch.begun() for each in list(self._under_way)})

    # The round's four parts.

    def _receive(self) -> Round:
        idle = not self.queues
        if idle:
            self._finish(leaving=0)
            self.capacity.check_counts(self.queues.running.values())
        return self._source.receive(block=idle)

    def _decide(self, arrived: Round) -> Batch:
        batch = Batch(arrived.number)
        for message in arrived.messages:
            self._accept(message, batch)
        if not self._shutdowns_to_come:
            self._abort_all(batch)
        if self.queues:
            self._plan(batch)
        return batch

    def _launch(self, arrived: Round, batch: Batch) -> None:
        step = batch.step()
        launched = Launched(arrived, batch)
        self._under_way.append(launched)
        if step:
            launched.pending = self._engine.launch(step)

    def _finish(self, leaving: int) -> None:
        while len(self._under_way) > leaving:
            launched = self._under_way.popleft()
            batch = launched.batch
            tokens = batch.align(launched.pending.tokens()) if launched.pending else []
            decisions = batch.decisions(tokens, self._commit(batch.requests, tokens))
            output = batch.output(decisions)
            if output:
                self._replies.send(replace(output, pool=self._tally.report()))
            self._log.fold(batch.round, decisions)
            if self._observe:
                self._observe(launched.arrived, decisions)

    # Messages.

    def _accept(self, message: RankMessage, batch: Batch) -> None:
        match message:
            case Generate():
                self._enqueue(message, batch)
            case Abort():
                self._abort(message.uid, batch)
            case Shutdown():
                self._shutdowns_to_come = max(0, self._shutdowns_to_come - 1)

    def _enqueue(self, message: Generate, batch: Batch) -> None:
        if self.queues.get(message.uid):
            raise RankError(self._log.rank, batch.round, "a new uid", f"{message.uid}, which is taken")
        request = Request.of(message, self._arrivals, batch.round, self._limits)
        self._arrivals += 1
        reason: FinishReason | None = "abort" if self._tombstones.take(request.uid) else self._refusal(request)
        if reason:
            batch.end(request.uid, reason)
        else:
            self.queues.enqueue(request)

    def _refusal(self, request: Request) -> FinishReason | None:
        """Why a request ends before it has begun; the front end lets none of these through."""
        limits, known = self._limits, len(request.tokens)
        if not known or known > limits.max_context:
            return "error"
        if known >= request.limit:
            return "length"
        if request.reserve > limits.pages * limits.page_size:
            return "error"
        return None

    def _abort(self, uid: int, batch: Batch) -> None:
        request = self.queues.get(uid)
        if request:
            self._end(request)
            batch.end(uid, "abort")
        else:
            self._tombstones.add(uid)

    def _abort_all(self, batch: Batch) -> None:
        for request in list(self.queues):
            self._abort(request.uid, batch)

    # The plan.

    def _plan(self, batch: Batch) -> None:
        full = [request for request in self.queues.decoding.values() if request.length == request.room]
        plan = self._ask(batch.round, len(full))
        if plan.decode:
            self._grow(full, batch)
        decoding = [each for each in self.queues.decoding.values() if each.length < each.room] if plan.decode else []
        for prefill in plan.prefill:
            self._prefill(prefill, batch)
        batch.decode(decoding)
        self._await_last_tokens(decoding)

    def _ask(self, round: int, growing: int) -> Plan:
        """The policy's plan, when ``growing`` pages are wanted by those that decode."""
        capacity = self.capacity
        limits = Limits(
            tokens=self._step_tokens,
            chunk=self._chunk,
            running=self._max_running,
            free_pages=max(0, capacity.available - growing),
            promised_pages=capacity.promised,
        )
        with self._blaming_policy(round):
            plan = self._policy.plan(View(self.queues, capacity, limits, round))
        wrong = breach(plan, self.queues, capacity, limits)
        if wrong:
            expected, found = wrong
            raise RankError(self._log.rank, round, f"policy {self._policy_name} to plan {expected}", found)
        return plan

    @contextmanager
    def _blaming_policy(self, round: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a policy is others' code, and may raise anything
            found = f"{type(error).__name__}: {error}"
            raise RankError(self._log.rank, round, f"policy {self._policy_name} to decide", found) from error

    def _prefill(self, prefill: Prefill, batch: Batch) -> None:
        request = self.queues.running.get(prefill.uid) or self._admit(prefill.uid, batch)
        if request is None:
            return
        swapped = self.capacity.catch_up(request)
        if swapped:
            assert request.holding is not None
            batch.give(request, swapped.start, request.holding.pages[swapped.start : swapped.stop])
        batch.prefill(request, min(prefill.tokens, request.pending))
        self.capacity.share(request)
        if not request.pending:
            self.queues.decoding[request.uid] = request
            self._await_last_tokens([request])

    def _await_last_tokens(self, requests: list[Request]) -> None:
        """Decode those no more whose token that is drawn now is the last."""
        for request in requests:
            if request.length + 1 >= request.limit:
                del self.queues.decoding[request.uid]

    # A running request's life.

    def _admit(self, uid: int, batch: Batch) -> Request | None:
        """Give a waiting request a row and pages; nobody is admitted in a round in which others had to give theirs."""
        request = self.queues.get_waiting(uid)
        if request is None or batch.retracted:
            return None
        self.capacity.admit(request)
        self.queues.admit(request)
        batch.start(request)
        return request

    def _grow(self, full: list[Request], batch: Batch) -> None:
        """Give each of these a page for its next token.

        Where there is none, they wait for requests that only await their last token; if there is none of these either,
        the last by the policy's order has to go. So the first keeps what it has, and goes on.
        """
        for request in full:
            while request.slot != NO_SLOT and not self.capacity.available:
                if self.queues.has_ending:
                    return
                with self._blaming_policy(batch.round):
                    last = self._last()
                self._retract(last, batch)
            if request.slot != NO_SLOT:
                index = request.length // self._limits.page_size
                batch.give(request, index, [self.capacity.grow(request)])

    def _last(self) -> Request:
        """The running request that the policy lets go first."""
        order = self._policy.retraction_order
        return max(self.queues.running.values(), key=lambda request: order(shown(request)))

    def _retract(self, request: Request, batch: Batch) -> None:
        """Take back what a request holds; it waits again, to be computed anew as far as that is not cached then."""
        self.capacity.release(request)
        self.queues.retract(request)
        batch.retracted.append(request.uid)
        self._tally.retractions += 1

    def _commit(self, requests: list[Request], tokens: list[int]) -> list[FinishReason | None]:
        """Append each request's token, end those that are finished, and say why they are.

        The token of a request that has ended meanwhile is struck out.
        """
        finished: list[FinishReason | None] = [None] * len(requests)
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if token == NO_TOKEN:
                continue
            if request.has_ended:
                tokens[row] = NO_TOKEN
                continue
            request.tokens.append(token)
            if token in request.stops:
                finished[row] = "stop"
            elif len(request.tokens) == request.limit:
                finished[row] = "length"
            else:
                continue
            self._end(request)
        return finished

    def _end(self, request: Request) -> None:
        """Forget a request and take back what it holds."""
        request.has_ended = True
        self.queues.remove(request)
        if request.slot != NO_SLOT:
            self.capacity.release(request)
