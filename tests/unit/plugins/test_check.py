"""``tpserve plugins check``: what keeps the contract, what breaks it, and what cannot be tested."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib import util
from pathlib import Path
from typing import Any

import psutil
import pytest

from tpserve.errors import ConfigError, UnavailablePlugin
from tpserve.plugins.check import check_contract, choose_device
from tpserve.plugins.registry import Registry

CARELESS_PLUGIN = """
import numpy
from tpserve.api import Options, PolicySpec, hookimpl

TPSERVE_API = 1

class CarelessOptions(Options, frozen=True):
    depth: int = 1

@hookimpl
def tpserve_policies():
    return [PolicySpec(name="careless", summary="-", factory="careless.policy:Careless", options=CarelessOptions)]
"""
CARELESS_POLICY = """
from tpserve.api import Plan, Policy, Prefill

class Careless(Policy):
    def plan(self, view):
        return Plan(tuple(Prefill(request.uid, request.tokens) for request in view.waiting()))
"""


def test_what_keeps_the_contract_passes(run_cli: Any) -> None:
    done = run_cli("plugins", "check", "policy.fcfs")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("policy.fcfs keeps the contract of the policy kind\n")


def test_what_was_skipped_is_told_with_the_reason(run_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_cli("plugins", "check", "ops.torch", "--fast")

    assert done.returncode == 0, done.stdout + done.stderr
    kept = "ops.torch keeps the contract of the ops kind, as far as --fast tests; 3 skipped: has no CUDA graph\n"
    assert done.stdout.endswith(kept)


def test_what_breaks_it_fails_and_says_where(run_cli: Any, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"careless/plugin.py": CARELESS_PLUGIN, "careless/policy.py": CARELESS_POLICY}
    site.add("careless", {"policy.careless": "careless.plugin"}, files)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-flag")

    done = run_cli("plugins", "check", "policy.careless", "--maxfail", "0")

    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.endswith("policy.careless breaks the contract of the policy kind\n")
    failed = {line.split("::")[-1].split("[")[0].split()[0] for line in done.stdout.splitlines() if "FAILED" in line}
    assert failed >= {"test_reading_the_spec_is_light", "test_every_option_is_described"}
    assert failed >= {"test_plans_keep_to_the_limits", "test_a_long_queue_is_not_read_to_its_end"}
    assert not failed & {"test_it_states_the_plugin_api", "test_the_class_implements_the_interface"}
    assert "the policy plans " in done.stdout


HANGING_PLUGIN = """
from tpserve.api import Options, PolicySpec, hookimpl

TPSERVE_API = 1

@hookimpl
def tpserve_policies():
    return [PolicySpec(name="hanging", summary="-", factory="hanging.policy:Hanging")]
"""
HANGING_POLICY = """
import time
from tpserve.api import Plan, Policy

class Hanging(Policy):
    def plan(self, view):
        print("planning", flush=True)
        time.sleep(600)
        return Plan()
"""


@pytest.fixture
def hanging(site: Any) -> None:
    files = {"hanging/plugin.py": HANGING_PLUGIN, "hanging/policy.py": HANGING_POLICY}
    site.add("hanging", {"policy.hanging": "hanging.plugin"}, files)


@pytest.mark.usefixtures("hanging")
def test_what_hangs_fails_at_the_limit_and_a_few_failures_are_enough(run_cli: Any) -> None:
    done = run_cli("plugins", "check", "policy.hanging", "--limit", "1", "--maxfail", "2")

    assert done.returncode == 1, done.stdout + done.stderr
    assert "the test takes more than 1 s" in done.stdout
    assert "stopping after 2 failures" in done.stdout
    assert "policy.hanging breaks the contract of the policy kind; testing stops after 2 failures" in done.stderr


@pytest.mark.parametrize("limit", ["0", "nan", "inf", "1e20"])
def test_a_limit_that_no_clock_knows_is_refused(run_cli: Any, limit: str) -> None:
    done = run_cli("plugins", "check", "policy.fcfs", "--limit", limit)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Invalid value for '--limit'" in done.stderr


@pytest.mark.usefixtures("hanging")
def test_a_check_that_is_terminated_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "tpserve.cli.main", "plugins", "check", "policy.hanging"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as check:
        pytest_of_it = await_child(check.pid)
        time.sleep(0.5)
        check.send_signal(signal.SIGTERM)
        assert check.wait(60) == 128 + signal.SIGTERM

    assert not pytest_of_it.is_running()
    assert [path.name for path in tmp_path.iterdir() if path.name != "site"] == []


def await_child(pid: int) -> psutil.Process:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(pid).children():
            return child
        time.sleep(0.05)
    raise AssertionError("it starts nothing")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["policy.nothing"], "error: there is no plugin 'policy.nothing'"),
        (["attention.triton"], "error: attention.triton is unavailable: "),
        (
            ["ops.torch", "--device", "tpu"],
            "error: --device: ops.torch does not offer 'tpu'\nhint: Devices: auto, cpu, ",
        ),
    ],
)
def test_what_cannot_be_tested_ends_with_exit_code_2(run_cli: Any, arguments: list[str], says: str) -> None:
    done = run_cli("plugins", "check", *arguments)

    assert done.returncode == 2
    assert done.stderr.startswith(says)
    assert "Traceback" not in done.stderr


def test_without_pytest_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = Registry.discover().load("policy", "fcfs")
    monkeypatch.setattr(util, "find_spec", lambda name: None)

    with pytest.raises(UnavailablePlugin) as caught:
        check_contract(plugin)

    assert caught.value.hint == "pip install pytest"


def test_the_device_is_one_that_the_plugin_offers() -> None:
    ops = Registry.discover().load("ops", "torch")

    assert choose_device(ops, "auto") == "cpu"
    assert choose_device(ops, "cuda") == "cuda"
    with pytest.raises(ConfigError, match="does not offer 'tpu'"):
        choose_device(ops, "tpu")
