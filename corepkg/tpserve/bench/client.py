"""Sends completion requests to a server and keeps the time of every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import mean

import httpx
import msgspec

REQUEST_TIMEOUT = 600.0

__all__ = ["Stream", "Summary", "complete", "summarise"]


class Stream(msgspec.Struct, frozen=True):
    """One request as its client saw it.

    Attributes:
        sent: when it was sent, seconds on the monotonic clock.
        arrivals: when each chunk with output came.
        tokens: output tokens, by the server's own count.
    """

    sent: float
    arrivals: list[float]
    tokens: int


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


def complete(url: str, prompts: Sequence[list[int]], max_tokens: int) -> list[Stream]:
    """Send all prompts at once, greedy and past the end of text, and read their streams to the end.

    Args:
        url: of the server, without a path.
        prompts: token ids.
        max_tokens: output tokens of each.

    Raises:
        httpx.HTTPError: a request was refused or broke off.
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
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT, limits=limits, trust_env=False) as client:
        return await asyncio.gather(*(_complete(client, prompt, max_tokens) for prompt in prompts))


async def _complete(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> Stream:
    body = {
        "model": (await client.get("/v1/models")).json()["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.monotonic()
    arrivals: list[float] = []
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = msgspec.json.decode(line[6:])
            if event.get("choices"):
                arrivals.append(time.monotonic())
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return Stream(sent, arrivals, tokens)
