"""The HTTP application: OpenAI's endpoints over an exchange."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpserve.errors import RequestError
from tpserve.frontend.exchange import Call, Exchange
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.problems import set_up_problems
from tpserve.frontend.prometheus import CONTENT_TYPE
from tpserve.frontend.response import GenerationResponse
from tpserve.frontend.schema import ChatRequest, CompletionRequest, GenerationRequest
from tpserve.frontend.wire import ChatFormat, CompletionFormat
from tpserve.version import __version__

__all__ = ["MAX_BODY", "build_app"]

MAX_BODY = 16 << 20
"""Bytes of a request's body; more is refused with 413."""

PATIENCE = 4
"""How many times as much of a longer body is read, and dropped, before the connection is closed on its sender."""

GENERATES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is wrong; `error.param` names the field."},
    429: {"description": "Too many requests wait; Retry-After says when to try again."},
    503: {"description": "Not ready, or too many requests in flight; Retry-After says when to try again."},
}


def build_app(exchange: Exchange, metrics: Metrics, model: str) -> FastAPI:
    """Make the application.

    Args:
        exchange: takes the requests.
        metrics: what it counts and times.
        model: the name that clients use.
    """
    app = FastAPI(title="tpserve", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, limit=MAX_BODY)
    set_up_problems(app)
    entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "tpserve"}

    def check_model(request: GenerationRequest) -> None:
        if request.model and request.model != model:
            raise _unknown_model(request.model)

    @app.post("/v1/chat/completions", response_class=Response, responses=GENERATES)
    async def create_chat_completion(request: ChatRequest) -> Response:
        check_model(request)
        call = Call([request.prompt()], request.params(), bool(request.stream), request.priority or 0)
        written = ChatFormat(model, request.include_usage, request.with_tokens)
        return GenerationResponse(exchange, call, written, request.limit_field)

    @app.post("/v1/completions", response_class=Response, responses=GENERATES)
    async def create_completion(request: CompletionRequest) -> Response:
        check_model(request)
        call = Call(list(request.prompt), request.params(), bool(request.stream), request.priority or 0)
        written = CompletionFormat(model, request.include_usage, request.with_tokens)
        return GenerationResponse(exchange, call, written, request.limit_field)

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json({"object": "list", "data": [entry]})

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        if name != model:
            raise _unknown_model(name)
        return _json(entry)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        if exchange.closed:
            return _json({"status": "unavailable", "reason": exchange.closed}, 503)
        return _json({"status": "ok"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    @app.get("/")
    async def root() -> Response:
        return _json({"server": "tpserve", "version": __version__, "model": model, "openapi": "/openapi.json"})

    return app


class BodyLimit:
    """Refuses bodies that are too long, before or while they come in.

    Args:
        app: the application behind.
        limit: bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and count what it reads."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                await self._hear_out(message, receive)
                raise HTTPException(413, f"the body is longer than {self._limit} bytes", {"Connection": "close"})
            return message

        await self._app(scope, counted, send)

    async def _hear_out(self, message: Message, receive: Receive) -> None:
        """Drop the rest of a body, within reason: a client that still sends when it is hung up on sees no answer."""
        size = 0
        while message.get("more_body") and size < PATIENCE * self._limit:
            message = await receive()
            size += len(message.get("body", b""))


def _unknown_model(name: str) -> RequestError:
    return RequestError(f"the model {name} does not exist", "model", "model_not_found", 404)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
