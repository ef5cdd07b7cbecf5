from __future__ import annotations

import asyncio

import pytest

from tpserve.bench.client import complete
from tpserve.bench.http import read_origin
from tpserve.bench.serve.counters import Counts, read_counts, scrape
from tpserve.frontend.metrics import Metrics
from tpserve.messages import PoolReport
from tpserve.testing.fake_server import FakeServer

VLLM = """
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 120.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 3.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+06
vllm:generation_tokens_created{engine="0"} 7.0
vllm:request_prompt_tokens_sum{engine="0"} 9.0
"""


def test_counters_of_other_servers_are_found_and_added_up() -> None:
    assert read_counts(VLLM) == Counts(123, 0, 1_500_000)
    assert read_counts("up 1\n") is None


def test_our_own_are_found() -> None:
    metrics = Metrics()
    metrics.prompt_tokens.add(5)
    metrics.cached_tokens.add(2)
    metrics.generation_tokens.add(7)
    metrics.take(PoolReport(1, 90, 80, 3, 0.5))

    assert read_counts(metrics.text().decode()) == Counts(5, 2, 7)


def test_counts_add_up() -> None:
    assert Counts(5, 2, 7) + Counts(1, 1, 1) == Counts(6, 3, 8)
    assert Counts(5, 2, 7) - Counts(1, 1, 1) == Counts(4, 1, 6)


@pytest.mark.parametrize("runs", [True, False])
def test_a_server_is_asked(server: FakeServer, runs: bool) -> None:
    complete(server.url, [[100, 101]], 5)
    found = asyncio.run(scrape(read_origin(server.url if runs else "http://127.0.0.1:1")))
    assert found == (Counts(2, 0, 3) if runs else None)
