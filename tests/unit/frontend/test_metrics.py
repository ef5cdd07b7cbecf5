"""What the server says of itself: by a clock that is wound by hand, and over HTTP."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import cast

import httpx

from tpserve.frontend.exchange import Call, Exchange
from tpserve.frontend.links import Connection
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.prometheus import CONTENT_TYPE
from tpserve.messages import FinishReason, PoolReport, Rejected, SamplingParams, Started, TextOutput
from tpserve.testing.fake_server import FakeServer
from tpserve.version import __version__

POOL = (
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "kv_cache_evicted_pages_total",
    "kv_cache_usage_perc",
)
DOCS = Path(__file__).parents[3] / "docs" / "http.md"


class Sink:
    """In place of a connection."""

    backlog = 0

    def send(self, uid: int, payload: bytes) -> None:
        pass


class Scene:
    """An exchange with some requests, and a clock."""

    def __init__(self, prompts: int, **params: object) -> None:
        self.now = 0.0
        self.metrics = Metrics(clock=lambda: self.now)
        self.exchange = Exchange(10, self.metrics)
        self.exchange.attach(cast("Connection", Sink()))
        self.exchange.open()
        call = Call(["x"] * prompts, SamplingParams(**params))  # type: ignore[arg-type]
        self.answers = self.exchange.submit(call, asyncio.Event())

    def deliver(self, uid: int, text: str = "a", finish: FinishReason | None = None, token: int = 5) -> None:
        self.exchange.deliver([TextOutput([uid], [token], [text], [finish])])

    def start(self, uid: int) -> None:
        self.exchange.deliver([TextOutput([], [], [], [], [Started(uid, 10, 4)])])

    def __getitem__(self, name: str) -> float:
        return samples(self.metrics.text().decode())[f"tpserve_{name}"]


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_a_request_is_timed_from_its_admission_to_its_end() -> None:
    scene = Scene(1)
    assert (scene["num_requests_waiting"], scene["num_requests_running"]) == (1, 0)
    scene.now = 1.5
    scene.start(0)
    assert (scene["num_requests_waiting"], scene["num_requests_running"]) == (0, 1)
    scene.now = 2.0
    scene.deliver(0)
    scene.now = 2.25
    scene.deliver(0)
    scene.now = 2.5
    scene.deliver(0, finish="length")

    assert (scene["time_to_first_token_seconds_count"], scene["time_to_first_token_seconds_sum"]) == (1, 2.0)
    assert (scene["inter_token_latency_seconds_count"], scene["inter_token_latency_seconds_sum"]) == (2, 0.5)
    assert (scene["e2e_request_latency_seconds_count"], scene["e2e_request_latency_seconds_sum"]) == (1, 2.5)
    assert (scene["request_prompt_tokens_sum"], scene["request_generation_tokens_sum"]) == (10, 3)
    assert (scene["prompt_tokens_total"], scene["prompt_tokens_cached_total"]) == (10, 4)
    assert scene["generation_tokens_total"] == 3
    assert (scene["num_requests_waiting"], scene["num_requests_running"]) == (0, 0)


def test_every_end_counts_once_and_by_its_reason() -> None:
    scene = Scene(8, stop=("x",))
    for uid in (0, 1, 2, 3, 4, 5):
        scene.start(uid)
    scene.deliver(0, finish="length")
    scene.deliver(1, finish="stop")
    scene.deliver(2, "ax")
    scene.deliver(3, finish="error", token=-1)
    scene.exchange.abort(scene.answers[4])
    scene.exchange.abort(scene.answers[4])
    scene.exchange.deliver([Rejected(6, "too long")])
    scene.exchange.fail("over")

    reasons = ("length", "stop", "error", "abort", "rejected")
    assert [scene[f'requests_total{{finish_reason="{reason}"}}'] for reason in reasons] == [1, 2, 3, 1, 1]
    assert (scene["num_requests_waiting"], scene["num_requests_running"]) == (0, 0)
    assert scene["e2e_request_latency_seconds_count"] == 3


def test_a_request_that_is_sent_again_counts_once() -> None:
    scene = Scene(1)
    scene.start(0)
    scene.deliver(0)
    scene.exchange.suspend("rank 0 died")
    scene.exchange.open()
    scene.start(0)
    scene.deliver(0, finish="length")

    assert (scene["prompt_tokens_total"], scene["generation_tokens_total"]) == (10, 2)
    assert scene['requests_total{finish_reason="length"}'] == 1


def test_what_happens_to_the_pool_counts_when_the_warm_up_is_over() -> None:
    metrics = Metrics()
    exchange = Exchange(10, metrics)

    def deliver(report: PoolReport) -> None:
        exchange.deliver([TextOutput([], [], [], [], pool=report)])

    def seen() -> list[float]:
        found = samples(metrics.text().decode())
        return [found[f"tpserve_{name}"] for name in POOL]

    deliver(PoolReport(0, 2, 0, 0, 0.25))
    assert seen() == [0, 0, 0, 0, 0]
    exchange.open()
    deliver(PoolReport(1, 20, 16, 3, 0.5))
    deliver(PoolReport(2, 10, 0, 0, 0.75))
    exchange.close("stopping")
    deliver(PoolReport(0, 5, 4, 1, 0.25))
    assert seen() == [3, 35, 20, 4, 0.25]
    exchange.suspend("rank 0 died")
    assert seen() == [3, 35, 20, 4, 0]
    deliver(PoolReport(0, 2, 0, 0, 0.25))
    exchange.open()
    deliver(PoolReport(1, 1, 1, 1, 0.125))
    assert seen() == [4, 36, 21, 5, 0.125]


def test_usage_is_what_the_server_counts_and_the_warm_up_does_not(client: httpx.Client) -> None:
    usage = client.post("/v1/completions", json={"prompt": ["a b", "abc"]}).json()["usage"]
    response = client.get("/metrics")
    found = samples(response.text)

    assert (response.status_code, response.headers["content-type"]) == (200, CONTENT_TYPE)
    assert found["tpserve_prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["tpserve_generation_tokens_total"] == usage["completion_tokens"]
    assert found['tpserve_requests_total{finish_reason="stop"}'] == 2
    assert found[f'tpserve_build_info{{version="{__version__}"}}'] == 1


def test_they_are_served_while_the_server_is_not_healthy(server: FakeServer, client: httpx.Client) -> None:
    server.go_down("rank 0 died")
    server.wait(lambda: client.get("/health").status_code == 503)

    assert client.get("/metrics").status_code == 200


def test_the_documented_names_are_those_served() -> None:
    rows = re.findall(r"^\| `(tpserve_\w+)` \| (\w+) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    served = [(metric.name, metric.type) for metric in Metrics().all]

    assert sorted(rows) == sorted(served)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in rows)
