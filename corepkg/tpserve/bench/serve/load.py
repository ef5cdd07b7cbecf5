"""Sends requests when they are due, whatever has become of those before, and keeps what each saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import msgspec

from tpserve.bench.client import RequestFailed, stream
from tpserve.bench.http import Origin

__all__ = ["Sample", "drive"]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request; times in seconds after the start of its run.

    Attributes:
        due: when it had to leave: its arrival, or later the moment when ``--max-concurrency`` had room.
        sent: when it left.
        arrivals: when each piece of its text came.
        prompt_tokens, cached_tokens, output_tokens: by the server's own count.
        error: why it failed; empty if it did not.
    """

    due: float
    sent: float = 0.0
    arrivals: list[float] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


async def drive(
    origin: Origin,
    requests: Sequence[tuple[str, Mapping[str, Any]]],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
) -> list[Sample]:
    """Send all requests and wait for their ends.

    Args:
        origin: of the server.
        requests: path and body of each.
        arrivals: when each arrives, in seconds from now.
        max_concurrency: the most in flight; further ones wait outside, and arrive no later for it.
    """
    gate: AbstractAsyncContextManager[Any] = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    start = time.monotonic()

    def since(moment: float) -> float:
        return round(moment - start, 6)

    async def send(path: str, body: Mapping[str, Any], due: float) -> Sample:
        async with gate:
            due = max(due, since(time.monotonic())) if max_concurrency else due
            try:
                seen = await stream(origin, path, body)
            except RequestFailed as error:
                return Sample(due=due, error=str(error))
        return Sample(
            due=due,
            sent=since(seen.sent),
            arrivals=[since(moment) for moment in seen.arrivals],
            prompt_tokens=seen.prompt_tokens,
            cached_tokens=seen.cached_tokens,
            output_tokens=seen.tokens,
        )

    tasks = []
    async with asyncio.TaskGroup() as group:
        for (path, body), due in zip(requests, arrivals, strict=True):
            if (wait := start + due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(send(path, body, due)))
    return [task.result() for task in tasks]
