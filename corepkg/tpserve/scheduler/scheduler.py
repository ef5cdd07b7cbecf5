"""The scheduler: the loop that every rank runs.

All that it decides follows from the messages of the rounds and the tokens that the engine draws, so ranks that get the
same rounds decide the same.
"""

from __future__ import annotations

import msgspec

from tpserve.api.policy import Limits, Policy
from tpserve.errors import RankError
from tpserve.kv.allocator import PageAllocator, SlotAllocator
from tpserve.messages import Abort, FinishReason, Generate, RankMessage, Shutdown
from tpserve.scheduler.batch import NO_TOKEN, Batch, breach
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.queues import NO_SLOT, Queues, Request, Tombstones, View
from tpserve.scheduler.replies import ReplySink
from tpserve.scheduler.round import Round, RoundSource
from tpserve.step import Engine, Pending

__all__ = ["Scheduler"]


class Launched(msgspec.Struct, eq=False):
    """A batch under way; nothing is pending if it computes nothing."""

    batch: Batch
    pending: Pending | None


class Scheduler:
    """One rank's scheduler.

    Args:
        source: where the rounds come from.
        replies: where outputs go.
        engine: computes the steps.
        policy: decides what is computed next.
        log: gets the decisions of every round.
        max_running: the most requests that hold pages at a time.
        max_step_tokens: the most tokens that one step computes, but for a prompt that is longer and runs alone.
        shutdowns: how many Shutdown messages end the run: one from each tokenizer.
    """

    def __init__(
        self,
        source: RoundSource,
        replies: ReplySink,
        engine: Engine,
        policy: Policy,
        log: DecisionLog,
        *,
        max_running: int,
        max_step_tokens: int,
        shutdowns: int = 1,
    ) -> None:
        self._source = source
        self._replies = replies
        self._engine = engine
        self._policy = policy
        self._log = log
        self._max_running = min(max_running, max_step_tokens, engine.limits.slots)
        self._max_step_tokens = max_step_tokens
        self._limits = engine.limits
        self._shutdowns_to_come = shutdowns
        self._arrivals = 0
        self._queues = Queues()
        self._tombstones = Tombstones()
        self._pages = PageAllocator(self._limits.pages)
        self._slots = SlotAllocator(self._limits.slots)

    def run(self) -> None:
        """Serve round after round, until told to stop.

        Raises:
            RankError: this rank cannot go on: a link failed, ranks diverged, or the policy broke its limits.
        """
        while self._shutdowns_to_come:
            arrived = self._receive()
            batch = self._decide(arrived)
            launched = self._launch(batch)
            self._finish(launched)
        self._replies.shutdown()

    def check(self) -> None:
        """Assert that every page and every slot is free, or held by exactly one running request."""
        running = self._queues.running.values()
        self._pages.check(request.pages for request in running)
        self._slots.check(request.slot for request in running)

    # The round's four parts.

    def _receive(self) -> Round:
        idle = not self._queues
        if idle:
            self.check()
        return self._source.receive(block=idle)

    def _decide(self, arrived: Round) -> Batch:
        batch = Batch(arrived.number)
        for message in arrived.messages:
            self._accept(message, batch)
        if not self._shutdowns_to_come:
            self._abort_all(batch)
        if self._queues:
            self._plan(batch)
        return batch

    def _launch(self, batch: Batch) -> Launched:
        step = batch.step()
        return Launched(batch, self._engine.launch(step) if step else None)

    def _finish(self, launched: Launched) -> None:
        batch = launched.batch
        tokens = batch.align(launched.pending.tokens()) if launched.pending else []
        decisions = batch.decisions(tokens, self._commit(batch.requests, tokens))
        output = batch.output(decisions)
        if output:
            self._replies.send(output)
        self._log.fold(batch.round, decisions)

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
        if self._queues.get(message.uid):
            raise RankError(self._log.rank, batch.round, "a new uid", f"{message.uid}, which is taken")
        request = Request.of(message, self._arrivals, self._limits)
        self._arrivals += 1
        reason: FinishReason | None = "abort" if self._tombstones.take(request.uid) else self._refusal(request)
        if reason:
            batch.end(request.uid, reason)
        else:
            self._queues.enqueue(request)

    def _refusal(self, request: Request) -> FinishReason | None:
        """Why a request ends before it has begun; the front end lets none of these through."""
        limits = self._limits
        if not request.tokens or request.known > limits.max_context:
            return "error"
        if request.known >= request.limit:
            return "length"
        if request.reserve > limits.pages * limits.page_size:
            return "error"
        return None

    def _abort(self, uid: int, batch: Batch) -> None:
        request = self._queues.get(uid)
        if request:
            self._release(request)
            batch.end(uid, "abort")
        else:
            self._tombstones.add(uid)

    def _abort_all(self, batch: Batch) -> None:
        for request in list(self._queues):
            self._abort(request.uid, batch)

    # The plan.

    def _plan(self, batch: Batch) -> None:
        limits = Limits(self._max_step_tokens, self._max_running, self._pages.free_count, self._limits.page_size)
        plan = self._policy.plan(View(self._queues, limits))
        wrong = breach(plan, self._queues, limits)
        if wrong:
            expected, found = wrong
            policy = type(self._policy).__qualname__
            raise RankError(self._log.rank, batch.round, f"policy {policy} to plan {expected}", found)
        decoding = list(self._queues.decoding.values()) if plan.decode else []
        for prefill in plan.prefill:
            self._prefill(prefill.uid, prefill.tokens, batch)
        batch.decode(decoding)

    def _prefill(self, uid: int, tokens: int, batch: Batch) -> None:
        waiting = self._queues.waiting.get(uid)
        given = self._admit(waiting, batch) if waiting else []
        request = self._queues.running[uid]
        batch.prefill(request, tokens, given)
        if not request.pending:
            self._queues.decoding[uid] = request

    # A running request's life.

    def _admit(self, request: Request, batch: Batch) -> list[int]:
        """Give a waiting request its row, and all pages that it can ever need: these."""
        request.slot = self._slots.alloc()
        request.pages = self._pages.alloc(-(-request.reserve // self._limits.page_size))
        self._queues.admit(request)
        batch.start(request)
        return request.pages

    def _commit(self, requests: list[Request], tokens: list[int]) -> list[FinishReason | None]:
        """Append each request's token, let those go that are finished, and say why they are."""
        finished: list[FinishReason | None] = [None] * len(requests)
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if token == NO_TOKEN:
                continue
            request.tokens.append(token)
            if token in request.stops:
                finished[row] = "stop"
            elif len(request.tokens) == request.limit:
                finished[row] = "length"
            else:
                continue
            self._release(request)
        return finished

    def _release(self, request: Request) -> None:
        """Forget a request and take back what it holds."""
        self._queues.remove(request)
        if request.slot != NO_SLOT:
            self._slots.free(request.slot)
            self._pages.free(request.pages)
