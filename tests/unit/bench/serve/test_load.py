"""Requests leave when they are due, whatever has become of the others."""

from __future__ import annotations

import asyncio
from typing import Any

from tpserve.bench.http import read_origin
from tpserve.bench.serve.load import Sample, drive
from tpserve.messages import Generate
from tpserve.testing.fake_server import FakeServer


def ask(prompt: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": prompt, "max_tokens": 8}


def arrived(server: FakeServer) -> int:
    return sum(isinstance(message, Generate) for message in server.seen)


async def drive_while_stopped(server: FakeServer, expected: int, limit: int | None) -> list[Sample]:
    """Drive six requests at a server that answers none until so many have reached it."""
    already = arrived(server)
    server.go.clear()
    due = [0.01 * number for number in range(6)]
    driven = asyncio.create_task(drive(read_origin(server.url), [ask([100, 101])] * 6, due, limit))
    await asyncio.to_thread(server.wait, lambda: arrived(server) - already >= expected)
    await asyncio.sleep(0.2)
    assert arrived(server) - already == expected
    server.go.set()
    return await driven


def test_a_slow_server_does_not_delay_arrivals(server: FakeServer) -> None:
    samples = asyncio.run(drive_while_stopped(server, 6, None))

    assert [sample.due for sample in samples] == [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]
    for sample in samples:
        assert sample.due <= sample.sent < sample.arrivals[0]
        assert (sample.prompt_tokens, sample.output_tokens, sample.error) == (2, 3, "")
        assert sample.arrivals[-1] >= 0.2


def test_with_a_limit_the_others_wait_outside(server: FakeServer) -> None:
    samples = asyncio.run(drive_while_stopped(server, 2, 2))

    assert all(sample.due >= 0.2 for sample in samples[2:])
    assert all(sample.sent >= sample.due for sample in samples)


def test_a_request_that_fails_is_named_and_the_others_go_on(server: FakeServer) -> None:
    requests = [ask("abc"), ask([10_000]), ask("a")]
    first, failed, last = asyncio.run(drive(read_origin(server.url), requests, [0.0, 0.0, 0.0]))
    assert failed.error.startswith("400: ")
    assert (failed.arrivals, failed.output_tokens) == ([], 0)
    assert (first.output_tokens, last.output_tokens) == (4, 2)
