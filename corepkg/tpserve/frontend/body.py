"""Bodies of requests, read whole before the application sees the request; those too long or too slow are refused."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpserve.errors import RequestError
from tpserve.frontend.exchange import Unavailable
from tpserve.frontend.problems import problem

__all__ = ["MAX_BODY", "BodyLimit"]

MAX_BODY = 16 << 20
"""Bytes of a request's body; more is refused with 413."""

STALL = 60.0
"""Seconds without a byte of the body after which a request is refused with 408."""

HEARD_OUT = 4
"""How many times as much of a longer body is read, and dropped, before the connection is closed on its sender."""

HEARD_OUT_SECONDS = 10.0
"""And for how long."""


class BodyLimit:
    """Answers for the application when a body is too long, too slow or unfinished.

    Args:
        app: the application behind.
        limit: bytes.
        stall: seconds without a byte.
    """

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY, stall: float = STALL) -> None:
        self._app = app
        self._limit = limit
        self._stall = stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body; not the ones whose client has gone before the end of it."""
        try:
            body = await self._read(Headers(scope=scope).get("content-length", ""), receive)
        except RequestError as error:
            await self._refuse(error, receive, send)
            return
        except asyncio.CancelledError:
            # That is how a server that stops gives up who is not ready in time, and it would report every one.
            await self._refuse(Unavailable("the server is stopping"), None, send)
            return
        if body is not None:
            await self._app(scope, _after(body, receive), send)

    async def _read(self, declared: str, receive: Receive) -> bytes | None:
        """The body; None: the client has gone.

        Raises:
            RequestError: it is too long, by what the client says of it or by what comes, or too slow.
        """
        if declared.isdigit() and int(declared) > self._limit:
            raise self._too_long()
        parts = []
        size = 0
        message: Message = {"more_body": True}
        while message.get("more_body"):
            try:
                async with asyncio.timeout(self._stall):
                    message = await receive()
            except TimeoutError:
                raise RequestError(f"no more of the body came for {self._stall:g} s", status=408) from None
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limit:
                raise self._too_long()
        return b"".join(parts)

    def _too_long(self) -> RequestError:
        return RequestError(f"the body is longer than {self._limit} bytes", status=413)

    async def _refuse(self, error: Exception, receive: Receive | None, send: Send) -> None:
        """Answer, and then drop the rest of the body: who still sends when it is hung up on may not see the answer."""
        response = problem(error)
        response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        if receive is not None:
            with suppress(TimeoutError, asyncio.CancelledError):  # it is answered, whether or not the server stops now
                async with asyncio.timeout(HEARD_OUT_SECONDS):
                    await self._hear_out(receive)
        await send({"type": "http.response.body"})

    async def _hear_out(self, receive: Receive) -> None:
        size = 0
        message: Message = {"more_body": True}
        while message.get("more_body") and size < HEARD_OUT * self._limit:
            message = await receive()
            size += len(message.get("body", b""))


def _after(body: bytes, receive: Receive) -> Receive:
    """What gives the body, and then what else there is to be received."""
    first = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def next_message() -> Message:
        return next(first, None) or await receive()

    return next_message
