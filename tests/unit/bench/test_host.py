from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tpserve.bench import host
from tpserve.bench.host import about, needed_by


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    return subprocess.run(
        ("git", "-C", folder, *identity, *arguments), capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_report_names_the_checkout_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "host.py"
    source.write_text("1")
    monkeypatch.setattr(host, "__file__", str(source))
    assert about(()).commit == ""

    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "nothing of ours")
    assert about(()).commit == ""

    git(tmp_path, "add", "host.py")
    git(tmp_path, "commit", "-q", "-m", "ours")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert about(()).commit == commit
    source.write_text("2")
    assert about(()).commit == f"{commit}+"


def test_what_packages_need_is_named_too() -> None:
    found = needed_by(["tpserve-transport-zmq", "no-such-package"])

    assert {"tpserve", "pyzmq", "tpserve-transport-zmq", "no-such-package"} <= found
    assert about(found).versions.keys() >= {"python", "tpserve", "pyzmq"}
