"""The api process from its first moment to its last, with processes dying in between."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import repeat

import httpx
import pytest

from tpserve.config import ServeConfig
from tpserve.frontend.control import Links
from tpserve.frontend.text import TextCodec
from tpserve.messages import Abort, Generate, RankMessage, Shutdown
from tpserve.step import EngineLimits
from tpserve.testing.fake_server import FakeServer
from tpserve.tokens import unpack_ids

ENDLESS = {"prompt": "x", "max_tokens": 300}


def endless(request: Generate) -> Iterator[int]:
    return iter(repeat(unpack_ids(request.prompt_ids)[0]))


@pytest.fixture
def server(codec: TextCodec) -> Iterator[FakeServer]:
    """A server that holds at most three requests and is not started; warmed up, its ranks stand still."""
    config = ServeConfig(max_requests=3, drain_timeout=0.5)
    with FakeServer(codec, endless, config) as server:
        yield server
        server.go.set()


@contextmanager
def held(server: FakeServer, count: int = 1, **fields: object) -> Iterator[list[Future[httpx.Response]]]:
    """Requests that have reached the rank and get no answer while it stands still."""
    server.go.clear()
    before = len(server.seen)
    with ThreadPoolExecutor(count) as pool, httpx.Client(base_url=server.url, timeout=60.0) as client:
        requests = [pool.submit(client.post, "/v1/completions", json={**ENDLESS, **fields}) for _ in range(count)]
        server.wait(lambda: len(server.seen) == before + count)
        yield requests


def error_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


def test_answers_503_until_the_warm_up_has_gone_through(server: FakeServer, client: httpx.Client) -> None:
    health = client.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "unavailable", "reason": "starting"})
    refused = client.post("/v1/completions", json=ENDLESS)
    assert (refused.status_code, error_of(refused), refused.headers["Retry-After"]) == (503, "starting", "1")
    assert client.get("/v1/models").status_code == 200
    server.start()
    assert client.get("/health").status_code == client.head("/health").status_code == 200
    assert client.post("/v1/completions", json=ENDLESS).status_code == 200


def test_the_warm_up_uses_every_link(codec: TextCodec) -> None:
    with FakeServer(codec, config=ServeConfig(tokenizers=2, detokenizers=5)) as server:
        server.start()
        uids = [message.uid for message in server.seen if isinstance(message, Generate)]
        assert {uid % 2 for uid in uids} == {0, 1}
        assert {uid % 5 for uid in uids} == {0, 1, 2, 3, 4}


def test_a_warm_up_that_does_not_fit_is_a_failure(codec: TextCodec) -> None:
    limits = EngineLimits(pages=1, page_size=2, slots=1, max_context=2, vocab_size=320, eos_ids=(2,))
    with FakeServer(codec, limits=limits) as server:
        with pytest.raises(AssertionError, match="failed: the warm-up failed: the prompt has"):
            server.start()
        assert "warm-up failed" in httpx.get(f"{server.url}/health").json()["reason"]


def test_requests_past_the_limit_are_turned_away_until_others_are_over(
    server: FakeServer, client: httpx.Client
) -> None:
    server.start()
    with held(server, 3) as requests:
        refused = client.post("/v1/completions", json=ENDLESS)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert refused.json()["error"]["code"] == "overloaded"
        server.go.set()
        assert [request.result(60).status_code for request in requests] == [200] * 3
    assert client.post("/v1/completions", json=ENDLESS).status_code == 200


@pytest.mark.parametrize("is_streaming", [False, True])
def test_past_its_queue_it_answers_429(codec: TextCodec, is_streaming: bool) -> None:
    asked = {**ENDLESS, "stream": is_streaming}
    with FakeServer(
        codec, endless, ServeConfig(max_running_requests=1, max_queued_requests=1, drain_timeout=0.5)
    ) as server:
        server.start()
        with httpx.Client(base_url=server.url, timeout=60.0) as client, held(server, 2) as requests:
            refused = client.post("/v1/completions", json=asked)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert refused.json()["error"] == {
                "message": "as many requests as may wait behind those that run: 1",
                "type": "rate_limit_error",
                "param": None,
                "code": "queue_full",
            }
            server.go.set()
            assert [request.result(60).status_code for request in requests] == [200] * 2
            assert client.post("/v1/completions", json=asked).status_code == 200


def test_a_client_that_has_gone_makes_room(server: FakeServer, client: httpx.Client) -> None:
    server.start()
    server.go.clear()
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=0.2) as other:
            other.post("/v1/completions", json={**ENDLESS, "prompt": ["x", "y", "z"]})
        server.wait(lambda: aborts(server.seen) == generates(server.seen) - 1)
    server.go.set()
    assert client.post("/v1/completions", json=ENDLESS).status_code == 200


def generates(seen: list[RankMessage]) -> int:
    return sum(isinstance(message, Generate) for message in seen)


def aborts(seen: list[RankMessage]) -> int:
    return sum(isinstance(message, Abort) for message in seen)


def test_after_a_death_the_next_generation_serves_and_finishes_what_is_in_flight(
    server: FakeServer, client: httpx.Client
) -> None:
    server.start()
    for _ in range(2):
        with held(server) as (request,):
            server.go_down("rank 1 died")
            server.wait(lambda: client.get("/health").status_code == 503)
            assert client.get("/health").json()["reason"] == "rank 1 died"
            assert client.head("/health").status_code == 503
            refused = client.post("/v1/completions", json=ENDLESS)
            assert (refused.status_code, error_of(refused)) == (503, "rank 1 died")
            server.go.set()
            server.start()
            assert request.result(60).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=ENDLESS).status_code == 200


def test_a_broken_link_is_reported_and_the_next_generation_has_a_new_one(codec: TextCodec) -> None:
    class Unlucky(FakeServer):
        is_broken = True

        def _open_links(self, generation: int) -> Links:
            links = super()._open_links(generation)
            if self.is_broken:
                self._kill_group()
            return links

    with Unlucky(codec, endless) as server:
        with pytest.raises(AssertionError, match=r"failed: the link to a tokenizer failed: .* has gone"):
            server.start()
        assert httpx.get(f"{server.url}/health").status_code == 503
        server.is_broken = False
        server.start()
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_damaged_reply_is_reported(codec: TextCodec) -> None:
    with FakeServer(codec) as server:
        server.start()
        server.send_to_api(b"garbage that is long enough to hold an envelope")
        assert "the link from the detokenizers failed" in server.reports.get(timeout=60)
        assert httpx.get(f"{server.url}/health").status_code == 503


def test_a_stopping_server_lets_requests_finish_and_takes_no_more(codec: TextCodec) -> None:
    server = FakeServer(codec, endless, ServeConfig(drain_timeout=60.0)).start()
    with httpx.Client(base_url=server.url, timeout=60.0) as client, held(server) as (request,):
        client.get("/health")
        server.request_stop()
        server.wait(lambda: client.get("/health").status_code == 503)
        refused = client.post("/v1/completions", json=ENDLESS)
        assert (refused.status_code, error_of(refused)) == (503, "the server is stopping")
        server.go.set()
        assert request.result(60).status_code == 200
    server.stop()
    assert server.seen[-1] == Shutdown()


def test_a_stopping_server_does_not_wait_for_ever(codec: TextCodec) -> None:
    server = FakeServer(codec, endless, ServeConfig(drain_timeout=0.1)).start()
    with held(server) as (request,):
        server.stop()
        response = request.result(60)
    assert (response.status_code, error_of(response)) == (503, "the server is stopping")


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_death_while_the_server_stops_is_told_to_clients(codec: TextCodec, is_streaming: bool) -> None:
    """At once, and as an error: nobody is cut off, though the drain had still a minute."""
    server = FakeServer(codec, endless, ServeConfig(drain_timeout=60.0)).start()
    with httpx.Client(base_url=server.url, timeout=60.0) as client, held(server, stream=is_streaming) as (request,):
        client.get("/health")
        server.request_stop()
        server.wait(lambda: client.get("/health").status_code == 503)
        server.go_down("rank 1 died")
        response = request.result(30)
    assert "the server is stopping" in response.text
    assert response.status_code == 503 or response.text.endswith("[DONE]\n\n"), response.text
    server.stop()


def test_a_stopping_server_gives_up_unfinished_bodies_without_a_word(
    codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeServer(codec) as server, ExitStack() as stack:
        url = httpx.URL(server.start().url)
        sockets = [stack.enter_context(socket.create_connection((url.host, url.port))) for _ in range(3)]
        for sock in sockets:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        sockets.pop().close()
        time.sleep(0.2)
        server.stop()
        answers = [sock.recv(1 << 16) for sock in sockets]

    assert all(answer.startswith(b"HTTP/1.1 503 ") and b"the server is stopping" in answer for answer in answers)
    assert [record for record in caplog.records if record.exc_info] == []
    assert len(caplog.records) < 5


def test_can_be_stopped_before_it_ever_served(codec: TextCodec) -> None:
    server = FakeServer(codec)
    server.wait(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    server.stop()


def test_the_event_loop_answers_pings(server: FakeServer) -> None:
    assert server.ping() == "alive"
