"""The whole server's life: it comes up, answers, is stopped in every way there is, and leaves nothing."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.launched import Launched, wait_for

PLUGIN = """
from tpserve.api import PolicySpec, hookimpl
TPSERVE_API = 1

@hookimpl
def tpserve_policies():
    return [PolicySpec(name="acme", summary="wrong", factory="acme_policy:Acme")]
"""
POLICY = """
from tpserve.api import Policy

class Acme(Policy):
    def __init__(self, options):
        raise ZeroDivisionError("a bug of Acme's")

    def plan(self, view):
        raise AssertionError
"""

Launch = Callable[..., Launched]


@pytest.fixture
def launch(runtime: Path, model: Path) -> Iterator[Launch]:
    servers: list[Launched] = []

    def start(*flags: str, folder: Path = model) -> Launched:
        servers.append(Launched(runtime, str(folder), "--kv-tokens", "4096", *flags))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.mark.parametrize("flags", [["--threads", "2"], ["--tp", "3", "--transport", "nng"]])
def test_it_serves_and_a_signal_stops_it(launch: Launch, flags: list[str]) -> None:
    server = launch(*flags)
    server.await_ready()
    ranks = 3 if "--tp" in flags else 1
    workers = {"api", "tokenizer0", "detokenizer0", "forkserver"}
    assert set(server.children()) == workers | {f"rank{n}" for n in range(ranks)}
    assert server.health() == 200
    assert server.chat().json()["usage"]["completion_tokens"] == 8
    server.process.send_signal(signal.SIGINT if ranks == 1 else signal.SIGTERM)
    assert server.end() == 0, server.text
    assert "ERROR" not in server.text
    assert server.left() == []


def test_several_workers_of_each_kind(launch: Launch) -> None:
    server = launch("--tp", "2", "--transport", "zmq", "--tokenizers", "2", "--detokenizers", "3")
    server.await_ready()
    assert {"tokenizer1", "detokenizer2"} <= set(server.children())
    assert [server.chat().status_code for _ in range(3)] == [200] * 3
    wait_for(lambda: server.sample("tpserve_kv_cache_usage_perc") == 0)
    assert server.sample("tpserve_prefix_cache_queries_total") > server.sample("tpserve_prefix_cache_hits_total") > 0
    everybody = [*server.children().values(), server.process]
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(server.chat, max_tokens=300)
        wait_for(lambda: server.sample("tpserve_num_requests_running") > 0)
        for process in everybody:  # as a service manager does
            process.send_signal(signal.SIGTERM)
        assert server.end() == 0, server.text
    assert answer.result().status_code == 200
    assert "ERROR" not in server.text


def test_requests_that_outlast_the_drain_end_and_the_stop_is_still_in_order(launch: Launch) -> None:
    server = launch("--drain-timeout", "0.2", "--max-context", "2048")
    server.await_ready()
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(server.chat, max_tokens=1900) for _ in range(4)]
        wait_for(lambda: server.children()["rank0"].cpu_percent(0.2) > 20)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0, server.text
    assert [answer.result().status_code for answer in answers] == [503] * 4
    assert "ERROR" not in server.text


def test_kill_9_leaves_no_process_and_the_next_start_sweeps(launch: Launch) -> None:
    server = launch("--tp", "2")
    server.await_ready()
    server.process.kill()
    assert server.end() == -signal.SIGKILL
    assert server.left()
    again = launch("--tp", "2")
    again.await_child("api")
    assert len(server.left()) == 1
    again.process.send_signal(signal.SIGTERM)
    assert again.end() == 128 + signal.SIGTERM
    assert again.left() == []


def test_a_rank_that_dies_is_answered_with_503_until_the_next_generation_serves(launch: Launch) -> None:
    server = launch("--tp", "2")
    server.await_ready()
    before = server.children()
    expected = server.chat().json()["choices"]
    before["rank1"].kill()
    assert wait_for(lambda: server.health() == 503)
    assert server.chat().status_code == 503
    server.await_ready(times=2)
    assert server.health() == 200
    assert server.chat().json()["choices"] == expected
    assert server.children()["api"].pid == before["api"].pid
    assert server.children()["rank0"].pid != before["rank0"].pid
    assert "rank1 ended with signal SIGKILL" in server.text
    assert server.text.count("Traceback") == 0
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0, server.text
    assert server.left() == []


def test_damaged_weights_end_the_start_with_one_error(launch: Launch, model: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(model, tmp_path / "damaged"))
    weights = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    server = launch("--tp", "2", folder=damaged)
    assert server.end() == 2
    assert server.text.count("error: ") == 1
    assert f"cannot read {damaged}/model.safetensors" in server.text
    assert "Traceback" not in server.text
    assert server.left() == []


def test_a_rank_that_fails_to_load_prints_its_traceback_once(launch: Launch, site: Any) -> None:
    site.add("acme", {"policy.acme": "acme_plugin"}, {"acme_plugin.py": PLUGIN, "acme_policy.py": POLICY})
    server = launch("--tp", "2", "--policy", "acme")
    assert server.end() == 1
    assert server.text.count("Traceback") == server.text.count("ZeroDivisionError: a bug of Acme's") == 1
    assert server.left() == []


def test_four_servers_side_by_side(launch: Launch) -> None:
    servers = [launch() for _ in range(4)]
    for server in servers:
        server.await_ready()
    assert len({server.url for server in servers}) == 4
    assert len(servers[0].left()) == 4
    assert [server.chat().status_code for server in servers] == [200] * 4
    for server in servers:
        server.process.send_signal(signal.SIGTERM)
    for server in servers:
        assert server.end() == 0, server.text
    assert servers[0].left() == []
