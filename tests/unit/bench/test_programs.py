"""What the programs that measure say of mistakes: one line and exit code 2, and of themselves with --help."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tpserve.bench import scheduler, trace
from tpserve.bench.arguments import run

PROGRAMS = Path(__file__).parents[3] / "benchmarks"

Ended = Callable[..., int]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ended:
    """Run a program, which must end by itself, in a folder of its own and on a machine without a GPU; the exit code."""

    def no_driver() -> list[int]:
        raise OSError("no driver")

    def run(name: str, *arguments: str) -> int:
        monkeypatch.setattr("tpserve.bench.arguments.cuda_devices", no_driver)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        start = (
            trace.main if name == "trace" else partial(runpy.run_path, str(PROGRAMS / f"{name}.py"), None, "__main__")
        )
        with pytest.raises(SystemExit) as end:
            start()
        assert isinstance(end.value.code, int)
        return end.value.code

    return run


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("against_minisgl", "", "expected the folder that holds its package minisgl, found ''"),
        ("against_minisgl", "nowhere", "expected the folder that holds its package minisgl, found 'nowhere'"),
        ("against_minisgl", "nowhere --repeats -1", "argument --repeats: '-1' is not a whole number from 0 to 100000"),
        ("against_minisgl", "nowhere --set foo", "argument --set: 'foo' is not SETTING=VALUE"),
        ("against_minisgl", "nowhere --set foo=1", "foo: there is no such setting"),
        ("against_minisgl", "--engine tpserve", "--engine needs a folder as --model, found None"),
        ("against_minisgl", "--engine tpserve --model nowhere", "--engine needs a folder as --model, found 'nowhere'"),
        ("against_vllm_cpu", "/nonexistent/python", "/nonexistent/python is no Python interpreter that has vLLM"),
        ("against_vllm_cpu", "false", "false is no Python interpreter that has vLLM"),
        ("against_vllm_cpu", "python --threads 0", "argument --threads: '0' is not a whole number from 1 to 1024"),
        ("against_vllm_cpu", "python --repeats 0", "argument --repeats: '0' is not a whole number from 1 to 100000"),
        ("vllm_cpu_peer", "", "the following arguments are required: folder, dtype, mode"),
        ("tensor_parallel", "--tp a", "argument --tp: 'a' is not a whole number from 1 to 64"),
        ("tensor_parallel", "--tp 0", "argument --tp: '0' is not a whole number from 1 to 64"),
        ("tensor_parallel", "--tp 1,2", "so many GPUs are needed: 2; there are 0"),
        ("tensor_parallel", "--set cache", "argument --set: 'cache' is not SETTING=VALUE"),
        ("tensor_parallel", "--requests none", "argument --requests: 'none' is not a whole number from 1 to 100000"),
        ("sums", "--ranks 2", "so many GPUs are needed: 2; there are 0"),
        ("sums", "--ranks 0", "argument --ranks: '0' is not a whole number from 2 to 64"),
        ("sums_cpu", "--ranks 1", "argument --ranks: '1' is not a whole number from 2 to 64"),
        ("sums_cpu", "--rows 1 " + "9" * 5000, f"argument --rows: '{'9' * 40}' is not a whole number from 1 to 65536"),
        ("sums", "--tiles 4096x100000000000000000000", "argument --tiles: '4096x100000000000000000000' is not"),
        ("sums", "--tiles 4096", "argument --tiles: '4096' is not BLOCKxWARPS"),
        ("trace", "", "the following arguments are required: DIR/rank0.json"),
        ("trace", "nowhere", "nowhere cannot be read: No such file or directory"),
        ("trace", ".", ". cannot be read: Is a directory"),
    ],
)
def test_a_mistake_is_one_line(
    name: str, arguments: str, says: str, ended: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(name, *arguments.split()) == 2
    assert f"error: {says}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "flag", "before"),
    [
        ("sums_cpu", "--ranks", ""),
        ("sums", "--largest", ""),
        ("tensor_parallel", "--tp", ""),
        ("tensor_parallel", "--requests", ""),
        ("against_minisgl", "--repeats", "x"),
    ],
)
def test_a_number_beyond_all_reason_is_one_line(
    name: str, flag: str, before: str, ended: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = "0001" + 20 * "0"
    assert ended(name, *before.split(), flag, huge) == 2
    assert f"error: argument {flag}: '{huge}' is not a whole number" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [("--running few", "error: --running: expected numbers"), ("--policy fcsf", "error: there is no policy plugin")],
)
def test_so_is_one_about_rounds(
    arguments: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scheduler", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        run(scheduler.main)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no JSON", "is no trace in Chrome's format"),
        ("[]", "is no trace in Chrome's format"),
        ("{}", "is no trace in Chrome's format"),
        ('{"traceEvents": [{"cat": "kernel"}]}', "is no trace in Chrome's format"),
        ('{"traceEvents": [{"cat": "cpu_op"}]}', "ran on a GPU"),
        (
            '{"traceEvents": [{"args": ' + 5000 * "[" + 5000 * "]" + "}]}",
            "rank0.json is no trace in Chrome's format: nested too deep",
        ),
    ],
)
def test_so_is_a_trace_that_is_none(
    content: str, says: str, ended: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.json").write_text(content)
    assert ended("trace", "rank0.json") == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["trace", *sorted(path.stem for path in PROGRAMS.glob("*.py"))])
def test_help_names_every_argument(name: str, ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(name, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: ")
    if name == "against_minisgl":
        assert "--engine" in text
        assert "--model FOLDER" in text
