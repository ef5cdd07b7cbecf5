"""Requirements are compared with metadata; probes run in a child that may crash, hang or chatter."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from tpserve.api import PolicySpec
from tpserve.plugins import availability
from tpserve.plugins.availability import check, check_all, check_requirements
from tpserve.plugins.discovery import AVAILABLE, Status
from tpserve.plugins.probe import run_probe

PROBES = """
    import os, sys, time
    print("chatter on stdout")

    def fine(): return None
    def refuses(): return "no such device,\\nsorry"
    def raises(): raise AssertionError("bad driver")
    def leaves(): sys.exit(7)
    def crashes(): os.abort()
    def hangs(): time.sleep(600)
    def forks():
        if os.fork() == 0: time.sleep(600)
    def complains():
        print("first\\nlast words", file=sys.stderr); os._exit(3)
"""


@pytest.fixture
def probes(site: Any) -> None:
    site.add("acme", {}, {"acme_probes.py": PROBES})


@pytest.mark.parametrize(
    ("requirement", "status"),
    [
        ("msgspec>=0.1", AVAILABLE),
        ("no-such-thing>=2; python_version < '3'", AVAILABLE),
        (
            "no-such-thing>=2",
            Status("unavailable", "needs no-such-thing>=2, which is not installed", "pip install 'no-such-thing>=2'"),
        ),
    ],
)
def test_requirements_are_checked_against_metadata(requirement: str, status: Status) -> None:
    assert check_requirements((requirement,)) == status


def test_a_version_that_does_not_fit_is_named(site: Any) -> None:
    site.add("acme-base", {}, version="1.4rc1")

    status = check_requirements(("acme-base>=1.3", "acme-base>=2", "no-such-thing"))

    assert status.reason == "needs acme-base>=2, but 1.4rc1 is installed; needs no-such-thing, which is not installed"
    assert status.hint == "pip install 'acme-base>=2' 'no-such-thing'"


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("fine", None),
        ("refuses", "no such device, sorry"),
        ("raises", "its probe failed: AssertionError: bad driver"),
        ("leaves", "its probe ended with exit code 7"),
        ("crashes", "its probe ended with signal SIGABRT"),
        ("complains", "its probe ended with exit code 3: last words"),
        ("missing", "its probe failed: AttributeError: module 'acme_probes' has no attribute 'missing'"),
    ],
)
def test_what_a_probe_does_is_the_reason(function: str, reason: str | None) -> None:
    found = run_probe(f"acme_probes:{function}", limit=60)

    assert found == reason or (found is not None and reason is not None and found.startswith(reason))


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("function", ["hangs", "forks"])
def test_a_probe_that_does_not_end_is_stopped(function: str) -> None:
    assert run_probe(f"acme_probes:{function}", limit=2) == "its probe did not answer within 2 s"


def test_a_probe_of_a_missing_module_fails() -> None:
    reason = run_probe("no_such_module:probe", limit=60)

    assert reason == "its probe failed: ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.usefixtures("probes")
def test_many_specs_are_checked_in_order() -> None:
    def spec(name: str, **more: Any) -> PolicySpec:
        return PolicySpec(name=name, summary="x", factory="a:B", **more)

    specs = [
        spec("a", probe="acme_probes:refuses"),
        spec("b"),
        spec("c", probe="acme_probes:fine"),
        spec("d", requires=("no-such-thing",), probe="acme_probes:hangs"),
        spec("e", probe="acme_probes:raises"),
    ]

    assert [status.state for status in check_all(specs, limit=60)] == [
        "unavailable",
        "available",
        "available",
        "unavailable",
        "unavailable",
    ]
    assert check(specs[3], limit=60).reason == "needs no-such-thing, which is not installed"


@pytest.mark.usefixtures("probes")
def test_who_waits_hears_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "SOON", 0.1)
    told: list[list[str]] = []
    probes = {"silent": "acme_probes:hangs", "none": ""}
    specs = [PolicySpec(name=name, summary="x", factory="a:B", probe=probe) for name, probe in probes.items()]

    statuses = check_all(list(specs), 1.0, told.append)

    assert told == [["policy.silent"]]
    assert [status.state for status in statuses] == ["unavailable", "available"]


@pytest.mark.usefixtures("probes")
def test_a_probe_ends_with_who_asked() -> None:
    code = "from tpserve.plugins.probe import run_probe; run_probe('acme_probes:hangs', limit=600)"
    with subprocess.Popen([sys.executable, "-c", code]) as asking:
        deadline = time.monotonic() + 60
        while not (children := psutil.Process(asking.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.02)
        asking.kill()

    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert len(children) == 1
