"""``tpserve plugins check``: what keeps the contract, what breaks it, and what cannot be tested."""

from __future__ import annotations

from importlib import util
from typing import Any

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


def test_what_breaks_it_fails_and_says_where(run_cli: Any, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"careless/plugin.py": CARELESS_PLUGIN, "careless/policy.py": CARELESS_POLICY}
    site.add("careless", {"policy.careless": "careless.plugin"}, files)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-flag")

    done = run_cli("plugins", "check", "policy.careless")

    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.endswith("policy.careless breaks the contract of the policy kind\n")
    failed = {line.split("::")[-1].split("[")[0].split()[0] for line in done.stdout.splitlines() if "FAILED" in line}
    assert failed >= {"test_reading_the_spec_is_light", "test_every_option_is_described"}
    assert failed >= {"test_plans_keep_to_the_limits", "test_a_long_queue_is_not_read_to_its_end"}
    assert not failed & {"test_it_states_the_plugin_api", "test_the_class_implements_the_interface"}
    assert "the policy plans " in done.stdout


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
