"""Admits requests, sends them on their way, and hands what comes back to those who wait.

The processes that answer may die. What is in flight then waits for the next ones, and is sent again together with the
output that has come: seeds and positions make the rest what it would have been.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from tpserve.errors import RequestError, TpserveError
from tpserve.frontend.answer import Answer
from tpserve.frontend.flights import MAX_RESENDS, Flights
from tpserve.frontend.links import Connection
from tpserve.frontend.metrics import Meter, Metrics
from tpserve.messages import (
    Abort,
    ApiMessage,
    ChatPrompt,
    Rejected,
    SamplingParams,
    Shutdown,
    TextOutput,
    Tokenize,
    encode,
)

__all__ = ["Call", "Exchange", "GivenUp", "QueueFull", "Unavailable"]

Prompt = str | list[int] | ChatPrompt

WORKER_BITS = 48

logger = logging.getLogger(__name__)


class Call(msgspec.Struct, frozen=True):
    """What one HTTP request asks of the engine.

    Attributes:
        prompts: one or more; each gets an answer of its own.
        params: for all of them.
        is_streaming: answers are read as they come.
        priority: of all of them; larger is more urgent.
    """

    prompts: list[Prompt]
    params: SamplingParams
    is_streaming: bool = False
    priority: int = 0


class Unavailable(TpserveError):
    """The server cannot take or finish a request now.

    Args:
        message: why, for the client.
        code: a short machine-readable code.
    """

    def __init__(self, message: str, code: str = "unavailable") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class QueueFull(Unavailable):
    """Too many requests wait already.

    Args:
        queued: how many may.
    """

    def __init__(self, queued: int) -> None:
        super().__init__(f"as many requests as may wait behind those that run: {queued}", "queue_full")


class GivenUp(Unavailable):
    """A request was in flight at so many deaths that it may be their cause.

    Args:
        reason: the last death.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the server failed {MAX_RESENDS + 1} times with this request in flight, so it is not tried again; "
            f"the last time: {reason}",
            "tried_too_often",
        )


class Exchange:
    """Owned by the event loop; every method is called there and returns at once.

    Args:
        max_requests: the most requests in flight.
        metrics: what is counted and timed of them, and of the ranks once :meth:`open` is called: not of the warm-up.
        max_queued: the most of them beyond those that may run; 0: no limit of its own.
        max_running: how many may run.
        worker: the api process's number, the high bits of its uids.

    Attributes:
        closed: why no request is admitted; empty while they are.
    """

    def __init__(
        self, max_requests: int, metrics: Metrics, max_queued: int = 0, max_running: int = 0, worker: int = 0
    ) -> None:
        self.closed = "starting"
        self._max_requests = max_requests
        self._max_queued = max_queued
        self._max_waiting = min(max_queued + max_running if max_queued else max_requests, max_requests)
        self._metrics = metrics
        self._counts_pool = False
        self._uids = itertools.count(worker << WORKER_BITS)
        self._flights = Flights()
        self._connection: Connection | None = None
        self._ended = asyncio.Semaphore(0)

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._flights)

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._flights.none()

    async def ended(self, detokenizers: int) -> None:
        """Wait until so many detokenizers have passed a Shutdown on: nothing comes after it."""
        for _ in range(detokenizers):
            await self._ended.acquire()

    def attach(self, connection: Connection | None) -> None:
        """Send over this connection from now on, or drop what would be sent."""
        self._connection = connection

    def open(self) -> None:
        """Send what is in flight again, with the output that has come; then admit requests."""
        messages = self._flights.again()
        if messages:
            logger.warning("sending %d request%s again", len(messages), "" if len(messages) == 1 else "s")
        for message in messages:
            self._post(message.uid, encode(message))
        self._counts_pool = True
        self.closed = ""

    def suspend(self, reason: str) -> None:
        """Admit no more requests; those in flight wait for :meth:`open`, but for those that were sent too often."""
        self.closed = reason
        self._counts_pool = False
        self._metrics.cache_usage.value = 0
        for answer in self._flights.take_spent():
            answer.fail(GivenUp(reason))

    def close(self, reason: str) -> None:
        """Admit no more requests; those in flight go on."""
        self.closed = reason

    def fail(self, reason: str) -> None:
        """Admit no more requests, and end those in flight with an error."""
        self.closed = reason
        for answer in self._flights.take_all():
            answer.fail(Unavailable(reason))

    def submit(self, call: Call, wake: asyncio.Event) -> list[Answer]:
        """Send a call's requests on their way.

        Args:
            call: what is asked.
            wake: set whenever there is news of any of the answers.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            Unavailable: not ready, or too many requests are in flight.
            QueueFull: too many requests wait behind those that run.
            RequestError: the request cannot be sent.
        """
        if self.closed:
            raise Unavailable(self.closed)
        if len(call.prompts) > self._max_waiting:
            raise RequestError(f"at most {self._max_waiting} prompts", "prompt")
        waiting = self._connection.backlog if self._connection else 0
        if max(len(self) + len(call.prompts), waiting) > self._max_requests:
            raise Unavailable(f"{self._max_requests} requests are in flight, the most that are admitted", "overloaded")
        if len(self) + len(call.prompts) > self._max_waiting:
            raise QueueFull(self._max_queued)
        return self._send(call, wake, MAX_RESENDS, self._metrics)

    async def warm_up(self, requests: int) -> None:
        """Send requests through the whole chain, before others are admitted, and wait for their answers.

        They do not count in the metrics.

        Args:
            requests: how many, with consecutive uids.

        Raises:
            Unavailable: the chain broke meanwhile.
            RequestError: a request was refused.
        """
        wake = asyncio.Event()
        call = Call(["Hello"] * requests, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        answers = self._send(call, wake, resends=0, metrics=Metrics())
        while not all(answer.is_over for answer in answers):
            await wake.wait()
            wake.clear()
        for answer in answers:
            if answer.error is not None:
                raise answer.error

    def abort(self, answer: Answer) -> None:
        """Let a request go that nobody waits for any more; nothing happens if it is over."""
        if self._flights.get(answer.uid):
            self._flights.take(answer.uid, answer.finish or "abort")
            self._post(answer.uid, encode(Abort(answer.uid)))

    def deliver(self, messages: Sequence[ApiMessage]) -> None:
        """Take what came from tokenizers and detokenizers."""
        for message in messages:
            match message:
                case TextOutput():
                    self._deliver_round(message)
                case Rejected():
                    self._deliver_refusal(message)
                case Shutdown():
                    self._ended.release()

    def _send(self, call: Call, wake: asyncio.Event, resends: int, metrics: Metrics) -> list[Answer]:
        requests = [
            Tokenize(next(self._uids), _dated(prompt), _seeded(call.params), priority=call.priority)
            for prompt in call.prompts
        ]
        payloads = [encode(request) for request in requests]
        stop, is_streaming = call.params.stop, call.is_streaming
        answers = [Answer(request.uid, stop, wake, is_streaming, Meter(metrics)) for request in requests]
        for request, answer, payload in zip(requests, answers, payloads, strict=True):
            self._flights.add(request, answer, resends)
            self._post(request.uid, payload)
        return answers

    def _post(self, uid: int, payload: bytes) -> None:
        if self._connection is not None:
            self._connection.send(uid, payload)

    def _deliver_round(self, output: TextOutput) -> None:
        flights = self._flights
        for started in output.started:
            flights.start(started)
        if output.pool is not None and self._counts_pool:
            self._metrics.take(output.pool)
        for uid, token, text, finish in zip(output.uids, output.tokens, output.texts, output.finished, strict=True):
            answer = flights.get(uid)
            if answer is None:
                continue
            if finish in ("error", "abort"):
                flights.take(uid, "error").fail(Unavailable("the engine could not finish this request"))
                continue
            answer.add(token, text, finish)
            if finish is not None:
                flights.take(uid, finish)
            elif answer.finish is not None:
                self.abort(answer)
            elif answer.is_overrun:
                self.abort(answer)
                answer.fail(Unavailable("the client reads this stream too slowly"))

    def _deliver_refusal(self, rejected: Rejected) -> None:
        if self._flights.get(rejected.uid):
            error = RequestError(rejected.message, rejected.param, rejected.code, rejected.status)
            self._flights.take(rejected.uid, "rejected").fail(error)


def _seeded(params: SamplingParams) -> SamplingParams:
    return params if params.seed is not None else replace(params, seed=secrets.randbits(63))


def _dated(prompt: Prompt) -> Prompt:
    """Let a template see the same day and hour however often the request is sent."""
    return replace(prompt, time=time.time()) if isinstance(prompt, ChatPrompt) else prompt
