"""``tpserve replay``: what it says, and its exit code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.scheduler.test_recording import first_record, forge, put, record


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "recorded"
    record(path)
    return path


def test_the_same_decisions_are_one_line(run_cli: Any, recorded: Path) -> None:
    done = run_cli("replay", str(recorded))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        f"{recorded}: [0-9]+ rounds, 30 requests, [0-9]+ tokens of none are decided alike by policy fcfs\n", done.stdout
    )
    assert done.stderr == ""


def test_other_options_end_at_the_first_difference(run_cli: Any, recorded: Path) -> None:
    done = run_cli("replay", str(recorded), "--policy", "fcfs", "-o", "policy.order=decode", "-o", "policy.reserve=0")
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert "are decided alike by policy fcfs" in first
    assert second.startswith("round ")
    assert " differs: recorded is " in second


def test_a_cut_off_recording_is_told(run_cli: Any, recorded: Path) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-3])
    done = run_cli("replay", str(recorded))
    assert done.returncode == 0
    assert "the end of the recording is missing" in done.stderr


def test_a_damaged_recording_is_one_line(run_cli: Any, recorded: Path) -> None:
    content = bytearray(recorded.read_bytes())
    content[-1] ^= 1
    recorded.write_bytes(content)
    done = run_cli("replay", str(recorded))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"error: {recorded}: record [0-9]+ is damaged\n", done.stderr)


def test_a_recording_without_a_round_is_no_success(run_cli: Any, recorded: Path) -> None:
    content = recorded.read_bytes()
    recorded.write_bytes(content[: first_record(content)])
    done = run_cli("replay", str(recorded))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {recorded} ends before the first round is whole\nhint: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "fcsf"], "error: there is no policy plugin named 'fcsf'\nhint: Did you mean 'fcfs'?"),
        (["-o", "policy.reserve=1"], "error: -o goes with --policy"),
        (["--policy", "fcfs", "-o", "policy.depth=1"], "error: -o policy.depth=1: no policy has an option 'depth'"),
    ],
)
def test_what_is_wrong_is_one_line(run_cli: Any, recorded: Path, arguments: list[str], says: str) -> None:
    done = run_cli("replay", str(recorded), *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(says)


def test_a_file_that_is_no_recording(run_cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("some text")
    done = run_cli("replay", str(path))
    assert done.returncode == 2
    assert done.stderr == f"error: {path} is no recording\nhint: tpserve launch --record FILE writes one\n"


@pytest.mark.parametrize(
    ("place", "odd"),
    [(("limits", "pages"), -1), (("options",), {"reserve": 7}), (("policy",), "none"), (("budget",), {})],
)
def test_a_forged_header_is_one_line_or_no_matter(run_cli: Any, recorded: Path, place: Any, odd: Any) -> None:
    forge(recorded, lambda records: put(records, (0, *place), odd))
    done = run_cli("replay", str(recorded))
    assert "Traceback" not in done.stderr
    if place != ("budget",):
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
