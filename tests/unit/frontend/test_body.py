"""Bodies that are too long, too slow or unfinished, as the server gives them to the application."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from tpserve.frontend import body
from tpserve.frontend.body import BodyLimit

LIMIT = 10
GONE = {"type": "http.disconnect"}


def part(content: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": content, "more_body": more}


class Request:
    """One request: what its client sends, and what it is answered."""

    def __init__(self, messages: Iterable[dict[str, Any]], declared: str = "") -> None:
        self.seen: list[dict[str, Any]] = []
        self.answer: list[dict[str, Any]] = []
        self.left = list(messages)
        self._headers = [(b"content-length", declared.encode())] if declared else []

    @property
    def status(self) -> int | None:
        return self.answer[0]["status"] if self.answer else None

    async def run(self) -> None:
        """Hand it to an application that reads all."""
        await BodyLimit(self._app, LIMIT, stall=0.05)(
            {"type": "http", "headers": self._headers}, self._receive, self._send
        )

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        while not self.seen or self.seen[-1] != GONE:
            self.seen.append(await receive())

    async def _receive(self) -> dict[str, Any]:
        if not self.left:
            await asyncio.sleep(600)
        return self.left.pop(0)

    async def _send(self, message: dict[str, Any]) -> None:
        self.answer.append(message)


def test_a_body_arrives_whole_and_what_comes_after_it_too() -> None:
    request = Request([part(b"12345"), part(b""), part(b"67890", more=False), GONE], declared="10")
    asyncio.run(request.run())
    assert request.seen == [part(b"1234567890", more=False), GONE]
    assert request.answer == []


def test_a_body_that_is_said_to_be_too_long_is_answered_before_it_is_read() -> None:
    request = Request([part(b"12345"), part(b"123456", more=False), GONE], declared="11")
    asyncio.run(request.run())
    assert request.status == 413
    assert [message["type"].rpartition(".")[2] for message in request.answer] == ["start", "body", "body"]
    assert request.left == [GONE]
    assert request.seen == []


def test_no_more_than_some_of_a_body_that_is_too_long_is_heard_out() -> None:
    request = Request([part(b"1234567890")] * 20)
    asyncio.run(request.run())
    assert request.status == 413
    assert len(request.left) == 20 - 2 - body.HEARD_OUT


def test_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "HEARD_OUT_SECONDS", 0.05)
    request = Request([], declared="11")
    asyncio.run(request.run())
    assert request.answer[-1] == {"type": "http.response.body"}


def test_a_body_that_stalls_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "HEARD_OUT_SECONDS", 0.05)
    request = Request([part(b"1"), part(b"2")])
    asyncio.run(request.run())
    assert request.status == 408


def test_a_client_that_leaves_is_not_answered() -> None:
    request = Request([part(b"1"), GONE])
    asyncio.run(request.run())
    assert (request.answer, request.seen) == ([], [])


def test_a_server_that_stops_answers_who_is_not_ready() -> None:
    request = Request([part(b"1")])

    async def stop() -> None:
        task = asyncio.create_task(request.run())
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(stop())
    assert request.status == 503
    assert request.answer[-1] == {"type": "http.response.body"}
