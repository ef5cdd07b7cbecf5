"""The HTTP response to one generation request: streamed or whole, and aborted when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import Response
from starlette.types import Receive, Scope, Send

from tpserve.errors import RequestError
from tpserve.frontend.answer import Answer
from tpserve.frontend.exchange import Call, Exchange
from tpserve.frontend.problems import describe
from tpserve.frontend.wire import Format, event

__all__ = ["GenerationResponse"]

JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """Submits a call and answers it.

    Nothing is sent, headers included, before the first event of a request has come: so a request that the tokenizer
    refuses is answered with a 4xx also if a stream was asked for. What fails later ends a stream with an error event.

    Args:
        exchange: admits the call.
        call: what is asked.
        format: how the answers are written.
        limit_field: what the client calls ``max_tokens``.
    """

    def __init__(self, exchange: Exchange, call: Call, format: Format, limit_field: str = "max_tokens") -> None:
        super().__init__()
        self._exchange = exchange
        self._call = call
        self._format = format
        self._limit_field = limit_field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI application.

        Raises:
            Unavailable: 503 or 429; nothing has been sent.
            RequestError: 4xx; nothing has been sent.
        """
        wake = asyncio.Event()
        answers = self._exchange.submit(self._call, wake)
        client = asyncio.create_task(self._watch(receive, answers, wake))
        try:
            if self._call.is_streaming:
                await self._stream(send, answers, wake)
            else:
                await self._whole(send, answers, wake)
        except ClientGoneError:
            pass
        finally:
            client.cancel()
            for answer in answers:
                self._exchange.abort(answer)

    async def _watch(self, receive: Receive, answers: Sequence[Answer], wake: asyncio.Event) -> None:
        """Wait for the client to go, then fail what is not over."""
        while (await receive())["type"] != "http.disconnect":
            pass
        for answer in answers:
            if not answer.is_over:
                self._exchange.abort(answer)
                answer.fail(ClientGoneError())

    async def _whole(self, send: Send, answers: Sequence[Answer], wake: asyncio.Event) -> None:
        while True:
            failure = self._failure(answers)
            if failure is not None:
                raise failure
            if all(answer.is_over for answer in answers):
                break
            await wake.wait()
            wake.clear()
        body = self._format.whole(answers)
        headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send, answers: Sequence[Answer], wake: asyncio.Event) -> None:
        await wake.wait()
        failure = self._failure(answers)
        if failure is not None:
            raise failure
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        parts = [self._format.opening(index) for index in range(len(answers))]
        running = dict(enumerate(answers))
        is_last = False
        while not is_last:
            wake.clear()
            parts += self._news(running)
            failure = self._failure(answers)
            is_last = failure is not None or not running
            if failure is not None:
                parts.append(event(describe(failure)))
            elif is_last:
                parts.append(self._format.closing(answers))
            if parts:
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": not is_last})
                parts = []
            if not is_last:
                await wake.wait()

    def _news(self, running: dict[int, Answer]) -> list[bytes]:
        """Events for all that has come; answers that are finished leave ``running``."""
        parts = []
        for index, answer in list(running.items()):
            if text := answer.read():
                parts.append(self._format.text(index, text, answer.read_tokens()))
            if answer.finish is not None:
                parts.append(self._format.finish(index, answer.finish, answer.read_tokens()))
                del running[index]
        return parts

    def _failure(self, answers: Sequence[Answer]) -> Exception | None:
        """Why the request fails, if it does.

        Raises:
            ClientGoneError: nobody is left to hear of it.
        """
        error = next((answer.error for answer in answers if answer.error is not None), None)
        if isinstance(error, ClientGoneError):
            raise error
        if isinstance(error, RequestError) and error.param == "max_tokens":
            return RequestError(error.message, self._limit_field, error.code, error.status)
        return error


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""
