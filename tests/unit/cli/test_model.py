"""``tpserve model`` prints a path, or one line of what is wrong."""

from __future__ import annotations

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
