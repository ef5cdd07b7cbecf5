"""The HTTP application: OpenAI's endpoints over an exchange."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import FastAPI, Response

from tpserve.errors import RequestError
from tpserve.frontend.body import BodyLimit
from tpserve.frontend.exchange import Call, Exchange
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.problems import set_up_problems
from tpserve.frontend.prometheus import CONTENT_TYPE
from tpserve.frontend.response import GenerationResponse
from tpserve.frontend.schema import ChatRequest, CompletionRequest, GenerationRequest
from tpserve.frontend.wire import ChatFormat, CompletionFormat
from tpserve.version import __version__

__all__ = ["build_app"]

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
    app.add_middleware(BodyLimit)
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


def _unknown_model(name: str) -> RequestError:
    return RequestError(f"the model {name} does not exist", "model", "model_not_found", 404)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
