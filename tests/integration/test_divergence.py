"""Ranks that decide differently: the person at the terminal reads in which round, on which rank, and what."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.launched import HANG, Launched

PLUGIN = """
from tpserve.api import PolicySpec, hookimpl
TPSERVE_API = 1

@hookimpl
def tpserve_policies():
    return [PolicySpec(name="acme", summary="wrong", factory="acme_policy:{policy}")]
"""
POLICIES = """
from setproctitle import getproctitle

from tpserve.api import Plan, Policy, Prefill


def fill(view):
    free, rows = view.limits.free_pages, view.limits.running - view.num_running
    prefill = []
    for request in view.waiting():
        free, rows = free - request.pages, rows - 1
        if free < 0 or rows < 0:
            break
        prefill.append(Prefill(request.uid, request.tokens))
    return prefill


def is_wrong():
    return getproctitle() == "tpserve: rank1"


class Order(Policy):
    def plan(self, view):
        prefill = fill(view)
        return Plan(tuple(prefill[::-1] if is_wrong() else prefill))


class Length(Policy):
    def plan(self, view):
        prefill = fill(view)
        if is_wrong() and any(each.tokens > 40 for each in prefill):
            prefill = [Prefill(each.uid, max(1, each.tokens // 2)) for each in prefill]
        begun = [Prefill(each.uid, each.pending) for each in view.running() if each.pending]
        return Plan((*begun, *prefill))
"""
DIFFERENCE = r"round \d+: (uids|lengths)\[\d\]( of request \d+)? differs: rank 0 has \d+, rank 1 has \d+"


@pytest.fixture
def server(site: Any, model: Path, request: pytest.FixtureRequest) -> Iterator[Launched]:
    install(site, request.param)
    with tempfile.TemporaryDirectory(prefix="tp") as runtime:
        flags = ["--tp", "2", "--policy", "acme", "--max-restarts", "0", "--watchdog", "6"]
        server = Launched(Path(runtime), str(model), "--kv-tokens", "4096", *flags)
        yield server
        server.kill()


def install(site: Any, policy: str) -> None:
    files = {"acme_plugin.py": PLUGIN.format(policy=policy), "acme_policy.py": POLICIES}
    site.add("acme", {"policy.acme": "acme_plugin"}, files)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["Order"], indirect=True)
def test_a_server_says_what_its_ranks_decided_differently(server: Launched) -> None:
    server.await_ready()

    def is_told() -> bool:
        return bool(re.search(DIFFERENCE, server.text)) or server.process.poll() is not None

    def ask(number: int) -> None:
        """Until two of those who ask happen to come in one round."""
        deadline = time.monotonic() + HANG
        while not is_told() and time.monotonic() < deadline:
            with suppress(httpx.HTTPError, LookupError, ValueError):  # as the server goes down
                server.chat(f"{number} " * 60, 30)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert server.end() == 1
    assert re.search(DIFFERENCE, server.text), server.text
    assert server.left() == []


@pytest.mark.slow
def test_an_offline_engine_says_it_too(site: Any, model: Path, run_cli: Any, tmp_path: Path) -> None:
    install(site, "Length")
    lines = [json.dumps({"prompt_ids": [5 + number] * 60, "max_tokens": 30}) for number in range(12)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    settings = {"policy": "acme", "kv_tokens": 4096, "watchdog": 6, "dtype": "float32"}
    (tmp_path / "settings.yaml").write_text(json.dumps(settings))
    done = run_cli("generate", "in.jsonl", str(model), "--tp", "2", "--config", "settings.yaml")
    assert done.returncode == 1
    first, second = done.stderr.splitlines()[-2:]
    assert first.startswith("error: rank1 failed: "), done.stderr
    assert re.fullmatch(DIFFERENCE, second), done.stderr
    assert "Traceback" not in done.stderr
