"""Sends requests to an OpenAI-compatible server and keeps the time of everything that comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from statistics import mean
from typing import Any

import httpx
import msgspec

from tpserve.errors import LaunchError, TpserveError

__all__ = ["RequestFailed", "Stream", "Summary", "complete", "open_client", "served_model", "stream", "summarise"]

TIMEOUT = httpx.Timeout(600.0, pool=None)
DONE = b"[DONE]"
ADDRESS = "Give the address of one that runs, like http://127.0.0.1:8000"


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


class Text(msgspec.Struct, frozen=True):
    """What a chunk adds to a chat's message."""

    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """What a chunk adds to its choice: ``text`` of a completion or ``delta`` of a chat."""

    text: str | None = None
    delta: Text = Text()
    finish_reason: str | None = None


class Cached(msgspec.Struct, frozen=True):
    """More about the prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """The server's counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Cached | None = None


class Problem(msgspec.Struct, frozen=True):
    """Why a request failed."""

    message: str


class Event(msgspec.Struct, frozen=True):
    """One event of a stream, or the body of a refusal."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Problem | None = None


EVENT = msgspec.json.Decoder(Event)


def open_client(url: str) -> httpx.AsyncClient:
    """Make a client of a server at this address that opens as many connections as it has requests.

    Raises:
        LaunchError: it is no address.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = url.rstrip("/").removesuffix("/v1")
    try:
        return httpx.AsyncClient(base_url=base, timeout=TIMEOUT, limits=limits, trust_env=False)
    except httpx.InvalidURL as error:
        raise LaunchError(f"{url} is no address of a server: {error}", ADDRESS) from None


async def served_model(client: httpx.AsyncClient) -> str:
    """The first model that the server has.

    Raises:
        LaunchError: there is no such server, or it has none.
    """
    try:
        response = await client.get("/v1/models", timeout=10.0)
        return str(response.raise_for_status().json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise LaunchError(f"no server answers at {client.base_url}: {_say(error)}", ADDRESS) from None
    except (ValueError, LookupError, TypeError):
        raise LaunchError(f"{client.base_url}v1/models names no model", "Name one with --model") from None


async def stream(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Stream:
    """Send one request and read its stream to the end.

    Args:
        client: of the server.
        path: ``/v1/completions`` or ``/v1/chat/completions``.
        body: without what makes it a stream.

    Raises:
        RequestFailed: it was refused, or broke off.
    """
    sent = time.monotonic()
    arrivals: list[float] = []
    end = sent
    usage = Usage()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", path, json=asked) as response:
            if response.status_code >= 400:
                raise RequestFailed(f"{response.status_code}: {_refusal(await response.aread())}")
            async for now, data in _events(response):
                event = EVENT.decode(data)
                if event.error is not None:
                    raise RequestFailed(event.error.message)
                for choice in event.choices:
                    if choice.text or choice.delta.content:
                        arrivals.append(now)
                    if choice.finish_reason is not None:
                        end = now
                usage = event.usage or usage
    except httpx.HTTPError as error:
        raise RequestFailed(_say(error)) from error
    except msgspec.DecodeError as error:
        raise RequestFailed(f"an event that cannot be read: {error}") from error
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    return Stream(sent, arrivals or [end], usage.completion_tokens or len(arrivals), usage.prompt_tokens, cached or 0)


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


async def _complete_all(url: str, prompts: Sequence[list[int]], max_tokens: int) -> list[Stream]:
    async with open_client(url) as client:
        settings = {"model": await served_model(client), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        bodies = [{**settings, "prompt": prompt} for prompt in prompts]
        return await asyncio.gather(*(stream(client, "/v1/completions", body) for body in bodies))


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """Server-sent events up to the last, each with the time when it came.

    Raises:
        RequestFailed: there was no last one.
    """
    rest = b""
    async for chunk in response.aiter_bytes():
        now = time.monotonic()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == DONE:
                return
            if data and line.startswith(b"data:"):
                yield now, data
    raise RequestFailed("the stream broke off")


def _refusal(body: bytes) -> str:
    try:
        error = EVENT.decode(body).error
    except msgspec.DecodeError:
        error = None
    return error.message if error else body[:200].decode(errors="replace").strip()


def _say(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
