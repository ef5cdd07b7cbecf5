"""Choosing parts of a server: what cannot be used ends in one or two lines, and harms only those who choose it."""

from __future__ import annotations

import json
from typing import Any

import pytest

BROKEN = {"acme/__init__.py": "", "acme/plugin.py": "TPSERVE_API = 1\nraise RuntimeError('no luck')\n"}


@pytest.fixture
def broken(site: Any) -> None:
    """Packages that are wrong in several ways, beside the real ones."""
    points = {"policy.acme": "acme.plugin", "transport.acme": "acme.plugin", "attention.acme": "acme.missing"}
    site.add("acme", {**points, "policy.twin": "acme.plugin", "nonsense": "acme.plugin"}, BROKEN)
    site.add("zenith", {"policy.twin": "zenith.plugin"})


@pytest.mark.usefixtures("broken")
@pytest.mark.slow
def test_broken_packages_do_not_touch_a_server_that_does_not_use_them(run_cli: Any) -> None:
    done = run_cli("launch", "--dry-run", "--json", "--tp", "2")

    assert done.returncode == 0, done.stderr
    composition = json.loads(done.stdout)["composition"]
    chosen = {part: composition[part]["name"] for part in ("transport", "pipes", "sync", "policy", "comm")}
    assert chosen == {"transport": "zmq", "pipes": "zmq", "sync": "shm", "policy": "fcfs", "comm": "shm"}


@pytest.mark.usefixtures("broken")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--policy", "fcsf"], "error: there is no policy plugin named 'fcsf'\nhint: Did you mean 'fcfs'?"),
        (["--policy", "acme"], "error: policy.acme is broken: acme.plugin: RuntimeError: no luck\nhint: Reinstall"),
        (["--policy", "twin"], "error: policy.twin is ambiguous: provided by acme 1.0 and by zenith 1.0\nhint: Uninst"),
        (["--attn", "flashinfer"], "error: attention.flashinfer is unavailable: needs flashinfer-python>=0.6.6,<0.7"),
        (["--attn", "torch,triton"], "error: attn is 'torch,triton': attention.triton is unavailable: "),
        (["--transport", "acme", "--tp", "2"], "error: transport.acme is broken: acme.plugin: RuntimeError: no luck"),
        (["-o", "policy.depth=1"], "error: -o policy.depth=1: no policy has an option 'depth'"),
        (["--port", "99999"], "error: --port: expected an integer from 0 to 65535, found 99999"),
    ],
)
def test_a_choice_that_cannot_be_had_says_why(run_cli: Any, flags: list[str], says: str) -> None:
    done = run_cli("launch", "--dry-run", *flags)

    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
