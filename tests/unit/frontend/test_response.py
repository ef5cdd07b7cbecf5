"""Responses as an ASGI server sees them, without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from tpserve.errors import RequestError
from tpserve.frontend.answer import MAX_UNREAD
from tpserve.frontend.exchange import Call, Exchange, Unavailable
from tpserve.frontend.links import Connection
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.response import GenerationResponse
from tpserve.frontend.wire import CompletionFormat
from tpserve.messages import (
    Abort,
    FinishReason,
    Rejected,
    SamplingParams,
    Started,
    TextOutput,
    Tokenize,
    TokenizerMessage,
    decode_tokenizer,
)


class Wire:
    """In place of a connection: keeps what is sent."""

    backlog = 0

    def __init__(self) -> None:
        self.sent: list[TokenizerMessage] = []

    def send(self, uid: int, payload: bytes) -> None:
        self.sent.append(decode_tokenizer(payload))


class Client:
    """An HTTP client that may read slowly, or go away."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.gone = asyncio.Event()
        self.messages: list[Any] = []

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.messages.append(message)

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()


class Scene:
    """One request over an exchange."""

    def __init__(self, prompts: int = 1, is_streaming: bool = True, limit_field: str = "max_tokens") -> None:
        self.wire = Wire()
        self.client = Client()
        self.exchange = Exchange(max_requests=10, metrics=Metrics())
        self.exchange.attach(cast("Connection", self.wire))
        self.exchange.open()
        call = Call(["x"] * prompts, SamplingParams(), is_streaming)
        self.response = GenerationResponse(self.exchange, call, CompletionFormat("m"), limit_field)
        self.task = asyncio.create_task(
            self.response({"type": "http"}, self.client.receive, self.client.send)  # type: ignore[arg-type]
        )

    def deliver(self, uid: int, text: str, finish: FinishReason | None = None, token: int = 5) -> None:
        self.exchange.deliver([TextOutput([uid], [token], [text], [finish])])

    @property
    def aborted(self) -> list[int]:
        return [message.uid for message in self.wire.sent if isinstance(message, Abort)]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def scenario(body: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(body(), 60))  # type: ignore[arg-type]

    run.__name__ = body.__name__
    return run


@scenario
async def test_nothing_is_sent_before_the_first_event() -> None:
    scene = Scene()
    await settle()
    assert [type(message) for message in scene.wire.sent] == [Tokenize]
    assert scene.client.messages == []
    scene.exchange.deliver([TextOutput([], [], [], [], [Started(0, 3, 0)])])
    await settle()
    assert scene.client.messages[0]["status"] == 200
    scene.deliver(0, "a", "length")
    await scene.task
    assert scene.client.messages[-1] == {**scene.client.messages[-1], "more_body": False}


@scenario
async def test_a_refusal_leaves_before_any_header() -> None:
    scene = Scene(limit_field="max_completion_tokens")
    await settle()
    scene.exchange.deliver([Rejected(0, "too long", "max_tokens", "code")])
    with pytest.raises(RequestError, match="too long") as caught:
        await scene.task
    assert caught.value.param == "max_completion_tokens"
    assert scene.client.messages == []
    assert scene.aborted == []


@scenario
async def test_a_refusal_of_one_prompt_aborts_the_others() -> None:
    scene = Scene(prompts=3, is_streaming=False)
    await settle()
    scene.exchange.deliver([Rejected(1, "too long", "prompt")])
    with pytest.raises(RequestError):
        await scene.task
    assert scene.aborted == [0, 2]
    assert len(scene.exchange) == 0


@scenario
async def test_what_comes_while_a_write_waits_goes_out_as_one_event() -> None:
    scene = Scene()
    await settle()
    scene.deliver(0, "a")
    await settle()
    scene.client.reads.clear()
    for text in "bcd":
        scene.deliver(0, text)
        await settle()
    scene.client.reads.set()
    scene.deliver(0, "e", "stop")
    await scene.task
    events = [json.loads(line.removeprefix("data: ")) for line in scene.client.body.split("\n\n")[:-2]]
    assert [event["choices"][0]["text"] for event in events] == ["a", "b", "cde", ""]


@scenario
async def test_a_stream_that_nobody_reads_is_aborted() -> None:
    scene = Scene()
    await settle()
    scene.deliver(0, "a")
    await settle()
    scene.client.reads.clear()
    scene.deliver(0, "b")
    await settle()
    scene.deliver(0, "x" * MAX_UNREAD)
    assert scene.aborted == []
    scene.deliver(0, "y")
    assert scene.aborted == [0]
    assert len(scene.exchange) == 0
    scene.deliver(0, "z" * MAX_UNREAD)
    scene.client.reads.set()
    await scene.task
    assert "too slowly" in scene.client.body.split("\n\n")[-2]
    assert scene.client.messages[-1]["more_body"] is False


@scenario
async def test_whole_answers_may_be_of_any_length() -> None:
    scene = Scene(is_streaming=False)
    await settle()
    scene.deliver(0, "x" * MAX_UNREAD)
    scene.deliver(0, "y" * MAX_UNREAD, "stop")
    await scene.task
    assert len(json.loads(scene.client.body)["choices"][0]["text"]) == 2 * MAX_UNREAD
    assert scene.aborted == []


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_has_gone_aborts_what_is_not_over(is_streaming: bool, has_begun: bool) -> None:
    async def body() -> None:
        scene = Scene(prompts=2, is_streaming=is_streaming)
        await settle()
        if has_begun:
            scene.deliver(0, "a", "stop")
            await settle()
        scene.client.gone.set()
        await scene.task
        assert scene.aborted == ([1] if has_begun else [0, 1])
        assert len(scene.exchange) == 0
        assert "error" not in scene.client.body

    asyncio.run(asyncio.wait_for(body(), 60))


@scenario
async def test_an_engine_that_gives_up_a_request_makes_it_unavailable() -> None:
    scene = Scene(is_streaming=False)
    await settle()
    scene.deliver(0, "", "error", token=-1)
    with pytest.raises(Unavailable, match="could not finish"):
        await scene.task
    assert scene.aborted == []


@scenario
async def test_an_unfinished_token_is_counted_and_the_end_without_one_is_not() -> None:
    scene = Scene(is_streaming=False)
    await settle()
    scene.deliver(0, "")
    scene.deliver(0, "ü")
    scene.deliver(0, "", "length", token=-1)
    await scene.task
    assert json.loads(scene.client.body)["usage"]["completion_tokens"] == 2
