"""Sends requests to an OpenAI-compatible server and keeps the time of everything that comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

import msgspec

from tpserve.bench.events import Events
from tpserve.bench.http import BrokenOff, Origin, read_origin, send
from tpserve.errors import LaunchError, TpserveError
from tpserve.values import read_json

__all__ = [
    "STARTUP",
    "RequestFailed",
    "Stream",
    "Summary",
    "await_ready",
    "complete",
    "get",
    "served_model",
    "stream",
    "summarise",
]

STARTUP = 600.0
"""Seconds that a server may take to be ready."""
LOOK_SECONDS = 0.25
"""Between looks whether it is."""


class RequestFailed(TpserveError):
    """A request was refused, or its stream broke off."""


class Stream(msgspec.Struct, frozen=True):
    """One request as its client saw it.

    Attributes:
        sent: when it was sent, seconds on the monotonic clock.
        arrivals: when each piece of text came; at least one.
        tokens: output tokens, by the server's own count.
        prompt_tokens: by the server's own count.
        cached_tokens: those of them that were in its prefix cache.
    """

    sent: float
    arrivals: list[float]
    tokens: int
    prompt_tokens: int
    cached_tokens: int


class Summary(msgspec.Struct, frozen=True):
    """Several requests together; times in seconds.

    Attributes:
        output_tokens: of all requests.
        wall: from the first request sent to the last token.
        tokens_per_second: the one over the other.
        ttft: mean time to first token.
        tpot: mean time per output token after the first.
    """

    output_tokens: int
    wall: float
    tokens_per_second: float
    ttft: float
    tpot: float


class Model(msgspec.Struct, frozen=True):
    """One model."""

    id: str


class Models(msgspec.Struct, frozen=True):
    """Those that a server has."""

    data: list[Model]


class Health(msgspec.Struct, frozen=True):
    """What a server says that is not ready."""

    reason: str = ""


async def get(origin: Origin, path: str) -> tuple[int, bytes]:
    """The status and the body of a response.

    Raises:
        BrokenOff: there was none.
    """
    pieces: list[bytes] = []
    status = await send(origin, "GET", path, b"", pieces.append)
    return status, b"".join(pieces)


async def await_ready(origin: Origin, note: Callable[[str], None], limit: float = STARTUP) -> None:
    """Wait as long as the server says on ``/health`` that it is unavailable, as one does that is starting.

    Args:
        origin: of the server, of whatever kind: one that has no ``/health`` is taken as ready.
        note: is told once, if there is something to wait for.
        limit: seconds.

    Raises:
        LaunchError: there is no such server, or it is unavailable still.
    """
    reason = ""
    try:
        async with asyncio.timeout(limit):
            while (found := await _ask(origin, "/health"))[0] == 503:
                is_first, reason = not reason, _reason(found[1])
                if is_first:
                    note(f"waiting for {origin.name}, {limit:g} s at most: {reason}")
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise LaunchError(f"{origin.name} is not ready after {limit:g} s: {reason or 'no answer'}") from None


async def served_model(origin: Origin) -> str:
    """The first model that the server has.

    Raises:
        LaunchError: there is no such server, or it has none.
    """
    status, body = await _ask(origin, "/v1/models")
    try:
        return read_json(body, Models).data[0].id
    except (msgspec.DecodeError, IndexError):
        raise LaunchError(f"{origin.name} names no model ({status} on /v1/models)", "Name one with --model") from None


async def stream(origin: Origin, path: str, body: Mapping[str, Any]) -> Stream:
    """Send one request and read its stream to the end.

    Args:
        origin: of the server.
        path: ``/v1/completions`` or ``/v1/chat/completions``.
        body: without what makes it a stream.

    Raises:
        RequestFailed: it was refused, or broke off.
    """
    sent = time.monotonic()
    events = Events()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        status = await send(origin, "POST", path, msgspec.json.encode(asked), events.feed)
    except BrokenOff as error:
        raise RequestFailed(str(error)) from error
    if status >= 400:
        raise RequestFailed(f"{status}: {events.refusal()}")
    if events.problem or not events.is_done:
        raise RequestFailed(events.problem or "the stream broke off")
    usage, arrivals = events.usage, events.arrivals
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    tokens = usage.completion_tokens or len(arrivals)
    return Stream(sent, arrivals or [events.end], tokens, usage.prompt_tokens, cached or 0)


def complete(url: str, prompts: Sequence[list[int]], max_tokens: int) -> list[Stream]:
    """Send all prompts at once, greedy and past the end of text, and read their streams to the end.

    Args:
        url: of the server, without a path.
        prompts: token ids.
        max_tokens: output tokens of each.

    Raises:
        RequestFailed: a request was refused or broke off.
    """
    return asyncio.run(_complete_all(url, prompts, max_tokens))


def summarise(streams: Sequence[Stream]) -> Summary:
    """Boil several streams down."""
    output_tokens = sum(stream.tokens for stream in streams)
    wall = max(stream.arrivals[-1] for stream in streams) - min(stream.sent for stream in streams)
    return Summary(
        output_tokens=output_tokens,
        wall=wall,
        tokens_per_second=output_tokens / wall,
        ttft=mean(stream.arrivals[0] - stream.sent for stream in streams),
        tpot=mean((stream.arrivals[-1] - stream.arrivals[0]) / max(1, stream.tokens - 1) for stream in streams),
    )


async def _ask(origin: Origin, path: str) -> tuple[int, bytes]:
    """As :func:`get`, of a server that may not be there."""
    try:
        return await get(origin, path)
    except BrokenOff as error:
        raise LaunchError(f"no server answers at {origin.name}: {error}", "Start one with `tpserve launch`") from None


def _reason(body: bytes) -> str:
    try:
        return read_json(body, Health).reason or "unavailable"
    except msgspec.DecodeError:
        return "unavailable"


async def _complete_all(url: str, prompts: Sequence[list[int]], max_tokens: int) -> list[Stream]:
    origin = read_origin(url)
    settings = {"model": await served_model(origin), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    bodies = [{**settings, "prompt": prompt} for prompt in prompts]
    return await asyncio.gather(*(stream(origin, "/v1/completions", body) for body in bodies))
