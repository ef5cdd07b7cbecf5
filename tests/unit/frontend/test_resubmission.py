"""Groups that die in the middle of an answer, and the next ones, which finish it: a client sees a pause."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest

from tpserve.api import PipeReceiver
from tpserve.frontend.control import Links
from tpserve.frontend.text import TextCodec
from tpserve.messages import Generate
from tpserve.testing.fake_server import FakeServer
from tpserve.tokens import unpack_ids

TEXT = "aß😀 日z"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""One token each: where a round's letter has arrived, the round's other tokens have."""

Answer = tuple[dict[int, str], dict[int, list[int]], dict[int, str], Any]


class Stalling:
    """Echoes, and stands still when an answer has so many tokens, once for each entry of ``at``; not at warm-ups."""

    def __init__(self) -> None:
        self.at: set[int] = set()
        self.go = Event()

    def __call__(self, request: Generate) -> Iterator[int]:
        is_warm_up = request.params.max_tokens == 2
        for count, token in enumerate(unpack_ids(request.prompt_ids), 1):
            if not is_warm_up and count in self.at and count > len(unpack_ids(request.output_ids)):
                self.at.discard(count)
                self.go.clear()
            yield token


@pytest.fixture
def script() -> Stalling:
    return Stalling()


@pytest.fixture
def server(codec: TextCodec, script: Stalling) -> Iterator[FakeServer]:
    with FakeServer(codec, script) as server:
        script.go = server.go
        yield server.start()
        server.go.set()


def revive(server: FakeServer) -> None:
    """Let the group die, and the next one serve."""
    server.go_down("rank 0 died")
    server.go.set()
    server.start()


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": [TEXT, LETTERS], "max_tokens": 100, "return_token_ids": True, **fields}


def stream(server: FakeServer, on_text: Callable[[int], None] = lambda count: None, **fields: Any) -> Answer:
    """What a stream brought; ``on_text`` hears how many letters have come, each time that there are more."""
    texts, tokens, reasons, usage = {0: "", 1: ""}, {0: [], 1: []}, {}, None
    asked = body(stream=True, stream_options={"include_usage": True}, **fields)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60.0) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        for line in iter(lambda: next(lines), "[DONE]"):
            event = json.loads(line)
            usage = event["usage"] or usage
            for choice in event["choices"]:
                index = choice["index"]
                texts[index] += choice["text"]
                tokens[index] += choice.get("token_ids", [])
                reasons[index] = choice["finish_reason"]
                if index == 1 and choice["text"]:
                    on_text(len(texts[1]))
        assert next(lines, None) is None
    return texts, tokens, reasons, usage


def whole(server: FakeServer, **fields: Any) -> Answer:
    response = httpx.post(f"{server.url}/v1/completions", json=body(**fields), timeout=60.0)
    assert response.status_code == 200, response.text
    found = response.json()
    return (
        {choice["index"]: choice["text"] for choice in found["choices"]},
        {choice["index"]: choice["token_ids"] for choice in found["choices"]},
        {choice["index"]: choice["finish_reason"] for choice in found["choices"]},
        found["usage"],
    )


def resumed(server: FakeServer) -> list[list[int]]:
    """What the newest two requests brought with them."""
    return [unpack_ids(message.output_ids).tolist() for message in server.seen if isinstance(message, Generate)][-2:]


def test_a_stream_goes_on_wherever_it_was_cut(server: FakeServer, script: Stalling, codec: TextCodec) -> None:
    undisturbed = stream(server)
    assert undisturbed[0] == {0: TEXT, 1: LETTERS}
    tokens, letters = codec.encode(TEXT), codec.encode(LETTERS)
    assert len(tokens) > len(TEXT) + 4  # so most cuts are within a character
    for cut in range(1, len(tokens) + 1):
        script.at = {cut}

        def die(count: int, cut: int = cut) -> None:
            if count == cut and not server.go.is_set():
                revive(server)

        assert stream(server, die) == undisturbed, f"cut behind token {cut}"
        assert resumed(server) == [tokens[:cut], letters[:cut]]


def test_a_stream_survives_two_deaths(server: FakeServer, script: Stalling) -> None:
    undisturbed = stream(server)
    for cut in (1, 4, 9):
        script.at = {cut, cut + 1}

        def die(count: int, cut: int = cut) -> None:
            if count in (cut, cut + 1) and not server.go.is_set():
                revive(server)

        assert stream(server, die) == undisturbed
        assert not script.at


@pytest.mark.parametrize("fields", [{}, {"stop": ["日z", "MNOP"]}, {"max_tokens": 10}])
def test_a_whole_answer_is_the_same(server: FakeServer, script: Stalling, fields: dict[str, Any]) -> None:
    undisturbed = whole(server, **fields)
    for cut in range(1, 10):
        script.at = {cut}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(whole, server, **fields)
            server.wait(lambda: not script.at)
            revive(server)
            assert answer.result(60) == undisturbed


def test_what_had_not_begun_is_sent_again_too(server: FakeServer) -> None:
    undisturbed = whole(server)
    server.go.clear()
    before = len(server.seen)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(whole, server)
        server.wait(lambda: len(server.seen) == before + 2)
        revive(server)
        assert answer.result(60) == undisturbed
    assert resumed(server) == [[], []]


def test_no_one_is_admitted_before_what_waits(server: FakeServer, script: Stalling) -> None:
    script.at = {3}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(whole, server)
        server.wait(lambda: not server.go.is_set())
        server.go_down("rank 0 died")
        server.wait(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert httpx.get(f"{server.url}/health").json()["reason"] == "rank 0 died"
        refused = httpx.post(f"{server.url}/v1/completions", json=body())
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "rank 0 died")
        server.go.set()
        server.start()
        answer.result(60)


def test_a_client_that_leaves_in_the_pause_is_forgotten(server: FakeServer, script: Stalling) -> None:
    script.at = {3}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body(stream=True), timeout=60.0) as response:
        lines = response.iter_lines()
        while server.go.is_set():
            next(lines)
        server.go_down("rank 0 died")
        server.wait(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    httpx.get(f"{server.url}/health")  # by the end of which it has been noticed
    server.go.set()
    server.start()
    assert whole(server)[0][0] == TEXT
    assert not any(message.output_ids for message in server.seen if isinstance(message, Generate))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_request_that_kills_every_group_is_given_up(server: FakeServer, script: Stalling, streaming: bool) -> None:
    script.at = {1, 2, 3}
    with ThreadPoolExecutor(1) as pool:
        url = f"{server.url}/v1/completions"
        answer = pool.submit(httpx.post, url, json=body(stream=streaming), timeout=60.0)
        for _ in range(3):
            server.wait(lambda: not server.go.is_set())
            revive(server)
        response = answer.result(60)
    if streaming and response.status_code == 200:
        last = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))
    else:
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
        last = response.json()
    assert last["error"]["code"] == "tried_too_often"
    assert "failed 3 times with this request in flight" in last["error"]["message"]
    assert whole(server)[0][0] == TEXT


@pytest.mark.parametrize("streaming", [False, True])
def test_when_the_server_gives_up_those_who_wait_hear_of_it(
    server: FakeServer, script: Stalling, streaming: bool
) -> None:
    script.at = {3}
    with ThreadPoolExecutor(1) as pool:
        url = f"{server.url}/v1/completions"
        answer = pool.submit(httpx.post, url, json=body(stream=streaming), timeout=60.0)
        server.wait(lambda: not server.go.is_set())
        server.go_down("rank 0 died")
        server.go.set()
        server.request_stop()
        response = answer.result(60)
    if streaming and response.status_code == 200:
        assert "the server is stopping" in response.text.split("\n\n")[-2]
    else:
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the server is stopping"


class Late(PipeReceiver):
    """Keeps what comes once ``holds`` is set, and hands it out when ``release`` is, though it has long been closed."""

    def __init__(self, receiver: PipeReceiver) -> None:
        self.holds = Event()
        self.has_held = Event()
        self.release = Event()
        self.has_delivered = Event()
        self._receiver = receiver

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        if self.release.is_set():
            self.has_delivered.set()
        frames = self._receiver.recv_many(max_frames, max_bytes, deadline)
        if self.holds.is_set():
            self.has_held.set()
            self.release.wait(60)
        return frames

    def close(self) -> None:
        self._receiver.close()


def test_what_a_dead_group_said_late_does_not_come_twice(codec: TextCodec, script: Stalling) -> None:
    receivers: list[Late] = []

    class Server(FakeServer):
        def _open_links(self, generation: int) -> Links:
            links = super()._open_links(generation)
            receivers.append(Late(links.receiver))
            return Links(receivers[-1], links.tokenizers)

    with Server(codec, script) as server:
        script.go = server.go
        server.start()
        undisturbed = whole(server)
        script.at = {4}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(whole, server)
            server.wait(lambda: not server.go.is_set())
            old = receivers[0]
            old.holds.set()
            server.go.set()
            assert old.has_held.wait(60)
            server.go.clear()
            server.go_down("rank 0 died")
            server.go.set()
            script.at = {11}
            server.start()
            server.wait(lambda: not server.go.is_set())
            old.release.set()
            assert old.has_delivered.wait(60)
            server.go.set()
            assert answer.result(60) == undisturbed
