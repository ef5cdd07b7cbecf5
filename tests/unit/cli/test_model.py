"""``tpserve model`` prints a path, or one line of what is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def test_get_prints_the_file_of_the_embedded_model(run_cli: Any) -> None:
    done = run_cli("model", "get")

    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).suffix == ".gguf"
    assert Path(done.stdout.strip()).stat().st_size > 90_000_000


def test_path_of_something_that_is_no_model(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("model", "path", str(tmp_path))

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path} has no config.json\nhint: ")


@pytest.mark.parametrize("command", [["model"], ["model", "fetch"]])
def test_a_group_needs_one_of_its_commands(run_cli: Any, command: list[str]) -> None:
    done = run_cli(*command)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        ("file", "Not a directory"),
        ("file/deeper", "Not a directory"),
        ("/proc/none", "No such file or directory"),
        ("readable", "Permission denied"),
    ],
)
def test_a_cache_that_cannot_be_written_is_told_before_anything_is_converted(
    run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, reason: str
) -> None:
    (tmp_path / "file").write_text("a file where the folder should be")
    (tmp_path / "readable").mkdir(mode=0o500)
    if cache == "readable" and os.access(tmp_path / "readable", os.W_OK):
        pytest.skip("this user may write everywhere")
    (tmp_path / "model.gguf").write_text("never read")
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / cache))

    done = run_cli("model", "path", str(tmp_path / "model.gguf"))

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: cannot write the cache {tmp_path / cache}/models: {reason}\n"
        "hint: Set TPSERVE_CACHE to a folder that can be written, or make this one so\n"
    )
