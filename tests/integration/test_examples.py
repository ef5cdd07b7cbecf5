"""The third-party packages in ``examples/``: they install beside tpserve, keep the contract, and carry messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
HANG = 120
"""Seconds after which something is taken to hang."""

QUICK = "test_ring or test_fanout or Package or cut or deadline or closes_delivers or killed or no_file or address"
"""Of each contract's tests."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment over the one that runs the tests, with the packages that can be installed."""
    folder = tmp_path_factory.mktemp("examples") / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    scheme = {"base": str(folder), "platbase": str(folder)}
    below = Path(sysconfig.get_path("purelib", "venv", vars=scheme), "below.pth")
    below.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    python = folder / "bin" / "python"
    packages = sorted(file.parent for file in EXAMPLES.glob("*/pyproject.toml"))
    pip = (sys.executable, *PIP, "--python", python, "install", "--no-deps")
    run(*pip, "--no-index", "--no-build-isolation", *packages)
    return python


@pytest.fixture(scope="module")
def rpyc(python: Path) -> None:
    """What the one package needs and tpserve does not."""
    command = [sys.executable, *PIP, "--python", str(python), "install", "rpyc>=6", "--retries", "1", "--timeout", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    if done.returncode:
        pytest.skip(f"the package index does not give rpyc: {done.stderr.strip().splitlines()[-1]}")


def run(*command: str | Path, cwd: Path = EXAMPLES) -> str:
    """Run a command that must succeed, and return its output."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ["OMP_NUM_THREADS"] = "1"
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, cwd=cwd, env=environ, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status(python: Path, name: str, cwd: Path) -> tuple[str, str]:
    """The distribution and the status of a transport, as the command line lists them."""
    rows = json.loads(run(python, "-m", "tpserve.cli.main", "plugins", "list", "--json", cwd=cwd))
    [row] = [row for row in rows if (row["kind"], row["name"]) == ("transport", name)]
    return row["distribution"], row["status"]


def keeps_the_contract(python: Path, package: str) -> None:
    flags = ("-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", f"({QUICK}) and not Little and not OneCall")
    run(python, "-m", "pytest", *flags, cwd=EXAMPLES / package)


def test_shared_memory(python: Path, tmp_path: Path) -> None:
    assert status(python, "shm", tmp_path) == ("tpserve-transport-shm", "available")
    keeps_the_contract(python, "transport_shm")


def test_ranks_see_the_same_messages_through_shared_memory(python: Path) -> None:
    flags = ("--transport", "shm", "--pipe-transport", "zmq", "--sync", "shm", "--ranks", "3", "--messages", "40")
    shown = run(python, "rank_io.py", *flags).splitlines()

    said = dict(re.fullmatch(r"rank (\d+): (.*)", line).groups() for line in shown)
    assert sorted(said) == ["0", "1", "2"]
    assert len(set(said.values())) == 1
    uids, _, _digest = said["0"].partition(" (")
    assert uids.replace("|", " ").split() == [str(uid) for uid in range(40)]


def test_remote_calls(python: Path, rpyc: None, tmp_path: Path) -> None:
    assert status(python, "rpc", tmp_path) == ("tpserve-transport-rpc", "available")
    keeps_the_contract(python, "transport_rpc")
