"""Errors in the shape of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from tpserve.errors import RequestError
from tpserve.frontend.exchange import GivenUp, QueueFull, Unavailable

__all__ = ["describe", "problem", "set_up_problems"]

LONGEST = 1000
"""Characters of a message."""

RETRY_AFTER = "1"
"""Seconds after which a client may try again."""


def describe(error: Exception) -> bytes:
    """An error as OpenAI's JSON object; for anything unexpected, without its text."""
    match error:
        case RequestError():
            return _body(error.message, "invalid_request_error", error.param, error.code)
        case QueueFull():
            return _body(error.message, "rate_limit_error", None, error.code)
        case Unavailable():
            return _body(error.message, "server_error", None, error.code)
        case _:
            return _body("the server met an error of its own; its log has it", "server_error", None, "internal_error")


def problem(error: Exception) -> Response:
    """The response to an error."""
    match error:
        case RequestError():
            return _response(error.status, error)
        case GivenUp():
            return _response(500, error, {"x-should-retry": "false"})
        case QueueFull():
            return _response(429, error, {"Retry-After": RETRY_AFTER})
        case Unavailable():
            return _response(503, error, {"Retry-After": RETRY_AFTER})
        case _:
            return _response(500, error)


def set_up_problems(app: FastAPI) -> None:
    """Make an application answer every error in OpenAI's shape."""

    async def ours(_: Request, error: Exception) -> Response:
        return problem(error)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem(_from_validation(error))

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        flaw = _flaw(error.__cause__)
        message = f"the body is not valid JSON: {flaw}" if flaw else str(error.detail)
        return _response(error.status_code, RequestError(message), dict(error.headers or {}))

    app.add_exception_handler(RequestError, ours)
    app.add_exception_handler(Unavailable, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, ours)


def _response(status: int, error: Exception, headers: dict[str, str] | None = None) -> Response:
    return Response(describe(error), status, headers, "application/json")


def _body(message: str, type: str, param: str | None, code: str | None) -> bytes:
    name = None if param is None else _shown(param)
    return msgspec.json.encode({"error": {"message": _shown(message), "type": type, "param": name, "code": code}})


def _shown(text: str) -> str:
    """A text that may quote what a client sent, of whatever length and characters."""
    cut = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
    return cut.encode(errors="replace").decode()


def _from_validation(error: RequestValidationError) -> RequestError:
    """The most specific of the things that are wrong with a body."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    found = [(_path(entry, error.body), entry) for entry in error.errors()]
    path, entry = max(found, key=lambda item: len(item[0]))
    if not path:
        return RequestError("the body must be a JSON object, sent with Content-Type: application/json")
    where = path[0] + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path[1:])
    if entry["type"] == "missing":
        return RequestError(f"{where} is required", where)
    message = str(entry["msg"]).replace(" after validation", "")
    return RequestError(f"{where}: {message[:1].lower()}{message[1:]}", where)


def _flaw(error: BaseException | None) -> str:
    """What is wrong with a body that Python's parser gives up; empty if it has not given up."""
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeDecodeError():
            return "it is not text in UTF-8"
        case ValueError():
            return "a number has too many digits"
        case _:
            return ""


def _path(entry: Mapping[str, Any], body: Any) -> list[Any]:
    """Where in the body an error is; the names of a union's alternatives, which are not in it, are left out."""
    path = []
    location = entry["loc"][1:]
    for index, step in enumerate(location):
        is_missing = entry["type"] == "missing" and index == len(location) - 1
        if isinstance(body, list) and isinstance(step, int):
            body = body[step]
        elif isinstance(body, dict) and (step in body or is_missing):
            body = body.get(step)
        else:
            continue
        path.append(step)
    return path
