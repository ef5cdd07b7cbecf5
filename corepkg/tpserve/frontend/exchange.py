"""The requests in flight: admits them, sends them on their way, and hands what comes back to those who wait."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from tpserve.errors import RequestError, TpserveError
from tpserve.frontend.answer import Answer
from tpserve.frontend.links import Connection
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

__all__ = ["Call", "Exchange", "Unavailable"]

Prompt = str | list[int] | ChatPrompt

WORKER_BITS = 48


class Call(msgspec.Struct, frozen=True):
    """What one HTTP request asks of the engine.

    Attributes:
        prompts: one or more; each gets an answer of its own.
        params: for all of them.
        is_streaming: answers are read as they come.
    """

    prompts: list[Prompt]
    params: SamplingParams
    is_streaming: bool = False


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


class Exchange:
    """Owned by the event loop; every method is called there and returns at once.

    Args:
        max_requests: the most requests in flight.
        worker: the api process's number, the high bits of its uids.

    Attributes:
        closed: why no request is admitted; empty while they are.
    """

    def __init__(self, max_requests: int, worker: int = 0) -> None:
        self.closed = "starting"
        self._max_requests = max_requests
        self._uids = itertools.count(worker << WORKER_BITS)
        self._answers: dict[int, Answer] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._connection: Connection | None = None
        self._ended = asyncio.Semaphore(0)

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._answers)

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    async def ended(self, detokenizers: int) -> None:
        """Wait until so many detokenizers have passed a Shutdown on: nothing comes after it."""
        for _ in range(detokenizers):
            await self._ended.acquire()

    def attach(self, connection: Connection | None) -> None:
        """Send over this connection from now on, or drop what would be sent."""
        self._connection = connection

    def open(self) -> None:
        """Admit requests."""
        self.closed = ""

    def close(self, reason: str) -> None:
        """Admit no more requests; those in flight go on."""
        self.closed = reason

    def fail(self, reason: str) -> None:
        """Admit no more requests, and end those in flight with an error."""
        self.closed = reason
        for uid in list(self._answers):
            self._take(uid).fail(Unavailable(reason))

    def submit(self, call: Call, wake: asyncio.Event) -> list[Answer]:
        """Send a call's requests on their way.

        Args:
            call: what is asked.
            wake: set whenever there is news of any of the answers.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            Unavailable: not ready, or too many requests are in flight.
            RequestError: the request cannot be sent.
        """
        if self.closed:
            raise Unavailable(self.closed)
        if len(call.prompts) > self._max_requests:
            raise RequestError(f"at most {self._max_requests} prompts", "prompt")
        waiting = self._connection.backlog if self._connection else 0
        if max(len(self._answers) + len(call.prompts), waiting) > self._max_requests:
            raise Unavailable(f"{self._max_requests} requests are in flight, the most that are admitted", "overloaded")
        return self._send(call, wake)

    async def warm_up(self, requests: int) -> None:
        """Send requests through the whole chain, before others are admitted, and wait for their answers.

        Args:
            requests: how many, with consecutive uids.

        Raises:
            Unavailable: the chain broke meanwhile.
            RequestError: a request was refused.
        """
        wake = asyncio.Event()
        call = Call(["Hello"] * requests, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        answers = self._send(call, wake)
        while not all(answer.is_over for answer in answers):
            await wake.wait()
            wake.clear()
        for answer in answers:
            if answer.error is not None:
                raise answer.error

    def abort(self, answer: Answer) -> None:
        """Let a request go that nobody waits for any more; nothing happens if it is over."""
        if answer.uid in self._answers:
            self._take(answer.uid)
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

    def _send(self, call: Call, wake: asyncio.Event) -> list[Answer]:
        requests = [Tokenize(next(self._uids), prompt, _seeded(call.params)) for prompt in call.prompts]
        payloads = [encode(request) for request in requests]
        answers = [Answer(request.uid, call.params.stop, wake, call.is_streaming) for request in requests]
        self._idle.clear()
        for answer, payload in zip(answers, payloads, strict=True):
            self._answers[answer.uid] = answer
            self._post(answer.uid, payload)
        return answers

    def _post(self, uid: int, payload: bytes) -> None:
        if self._connection is not None:
            self._connection.send(uid, payload)

    def _deliver_round(self, output: TextOutput) -> None:
        answers = self._answers
        for started in output.started:
            answer = answers.get(started.uid)
            if answer is not None:
                answer.start(started.prompt_tokens, started.cached_tokens)
        for uid, token, text, finish in zip(output.uids, output.tokens, output.texts, output.finished, strict=True):
            answer = answers.get(uid)
            if answer is None:
                continue
            if finish in ("error", "abort"):
                self._take(uid).fail(Unavailable("the engine could not finish this request"))
                continue
            answer.add(token, text, finish)
            if finish is not None:
                self._take(uid)
            elif answer.finish is not None:
                self.abort(answer)
            elif answer.is_overrun:
                self.abort(answer)
                answer.fail(Unavailable("the client reads this stream too slowly"))

    def _deliver_refusal(self, rejected: Rejected) -> None:
        if rejected.uid in self._answers:
            error = RequestError(rejected.message, rejected.param, rejected.code, rejected.status)
            self._take(rejected.uid).fail(error)

    def _take(self, uid: int) -> Answer:
        answer = self._answers.pop(uid)
        if not self._answers:
            self._idle.set()
        return answer


def _seeded(params: SamplingParams) -> SamplingParams:
    return params if params.seed is not None else replace(params, seed=secrets.randbits(63))
