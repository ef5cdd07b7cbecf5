"""The client against a server that echoes prompts, and against ones that behave badly."""

from __future__ import annotations

import asyncio
from threading import Timer
from typing import Any

import pytest
from tests.unit.bench.answering import answering

from tpserve.bench.client import RequestFailed, Stream, await_ready, complete, served_model, stream, summarise
from tpserve.bench.http import read_origin
from tpserve.errors import LaunchError
from tpserve.frontend.text import TextCodec
from tpserve.testing.fake_server import FakeServer


def ask(url: str, path: str, **body: Any) -> Stream:
    return asyncio.run(stream(read_origin(url), path, body))


def answer(content: bytes, status: int = 200) -> Stream:
    """What a client makes of this response."""
    response = f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content

    async def run() -> Stream:
        async with answering(response) as origin:
            return await stream(origin, "/v1/completions", {})

    return asyncio.run(run())


def test_a_completion_is_counted_as_the_server_does_and_every_text_is_timed(server: FakeServer) -> None:
    seen = ask(f"{server.url}/v1/", "/v1/completions", prompt="abc", max_tokens=20)

    assert (seen.prompt_tokens, seen.tokens, seen.cached_tokens) == (3, 4, 0)
    assert 1 <= len(seen.arrivals) <= 3
    assert seen.sent < seen.arrivals[0] <= seen.arrivals[-1]


def test_a_server_that_is_starting_is_waited_for(codec: TextCodec) -> None:
    said: list[str] = []
    with FakeServer(codec) as server:

        def note(text: str) -> None:
            said.append(text)
            Timer(0.3, server.start).start()

        asyncio.run(await_ready(read_origin(server.url), note, 60))
        assert ask(server.url, "/v1/completions", prompt="abc", max_tokens=2).tokens == 2
        asyncio.run(await_ready(read_origin(server.url), note, 60))

    assert said == [f"waiting for {server.url[7:]}, 60 s at most: starting"]


def test_it_is_not_waited_for_in_eternity(codec: TextCodec) -> None:
    with (
        FakeServer(codec) as server,
        pytest.raises(LaunchError, match=r"is not ready after 0\.1 s: starting"),
    ):
        asyncio.run(await_ready(read_origin(server.url), lambda text: None, 0.1))
    with pytest.raises(LaunchError, match="no server answers"):
        asyncio.run(await_ready(read_origin("http://127.0.0.1:1"), lambda text: None, 60))


def test_a_server_of_another_kind_has_perhaps_no_health() -> None:
    async def run() -> None:
        async with answering(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n") as origin:
            await await_ready(origin, pytest.fail, 60)

    asyncio.run(run())


def test_the_role_of_a_chat_is_no_text() -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    text = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9,"prompt_tokens_details":null}}\n\n'

    seen = answer(role + text + text + end + usage + b"data: [DONE]\n\n")
    assert (len(seen.arrivals), seen.tokens, seen.prompt_tokens) == (2, 9, 3)
    assert len(answer(role + end + b"data: [DONE]\n\n").arrivals) == 1


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b'{"error": {"message": "too many"}}', 503, "503: too many"),
        (b"<html>gone</html>", 404, "404: <html>gone</html>"),
        (b'{"more": ' + 5000 * b"[" + 5000 * b"]" + b"}", 500, r'500: {"more": \[\['),
        (b'data: {"error": {"message": "a rank died"}}\n\n', 200, "a rank died"),
        (b'data: {"choices": []}\n\n', 200, "the stream broke off"),
        (b"data: nonsense\n\n", 200, "an event that cannot be read"),
        (b'data: {"more": ' + 5000 * b"[" + 5000 * b"]" + b"}\n\n", 200, "an event that cannot be read: maximum"),
    ],
)
def test_a_failure_is_named(content: bytes, status: int, says: str) -> None:
    with pytest.raises(RequestFailed, match=says):
        answer(content, status)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://a:b"])
def test_an_address_without_a_server_is_told(url: str) -> None:
    with pytest.raises(LaunchError) as caught:
        asyncio.run(served_model(read_origin(url)))
    assert "\n" not in caught.value.message


def test_a_server_without_a_model_is_told() -> None:
    async def run() -> str:
        async with answering(b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\n{}") as origin:
            return await served_model(origin)

    with pytest.raises(LaunchError, match=r"names no model \(503"):
        asyncio.run(run())


def test_streams_are_boiled_down(server: FakeServer) -> None:
    assert [found.tokens for found in complete(server.url, [[100, 101], [102]], 5)] == [3, 2]

    summary = summarise([Stream(0.0, [1.0, 3.0], 5, 2, 0), Stream(1.0, [4.0, 5.0], 3, 2, 0)])
    assert (summary.output_tokens, summary.wall, summary.tokens_per_second) == (8, 5.0, 1.6)
    assert (summary.ttft, summary.tpot) == (2.0, 0.5)
