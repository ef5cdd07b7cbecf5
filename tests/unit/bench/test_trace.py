from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpserve.bench.trace import main, read_trace


def write(path: Path, *events: tuple[str, str, float, float]) -> Path:
    made: list[dict[str, Any]] = [{"cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in events]
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *made]}))
    return path


def test_gaps_are_where_nothing_runs(tmp_path: Path) -> None:
    gpu = read_trace(
        write(
            tmp_path / "t.json",
            ("kernel", "a", 100, 50),
            ("kernel", "b", 110, 10),
            ("cpu_op", "x", 0, 1000),
            ("gpu_memcpy", "c", 180, 20),
            ("kernel", "a", 200, 100),
        )
    )
    assert gpu.seconds == pytest.approx(200e-6)
    assert gpu.gaps == [pytest.approx(30e-6)]
    assert gpu.idle == pytest.approx(0.15)
    assert list(gpu.kernels) == ["a", "c", "b"]
    assert gpu.kernels["a"] == (pytest.approx(150e-6), 2)


EVENT = {"cat": "kernel", "name": "a", "ts": 1, "dur": 1}


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({**EVENT, "ts": "x"}, "Expected `float`, got `str`"),
        ({**EVENT, "name": None}, "Expected `str`, got `null`"),
        ({**EVENT, "dur": -1}, "Expected `float` >= 0"),
        ({"cat": "kernel", "name": "a", "ts": 1}, "missing required field `dur`"),
        (5, "Expected `object`, got `int`"),
        ({**EVENT, "dur": 0}, "took no time"),
    ],
)
def test_what_is_no_trace_of_a_gpu_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], event: object, says: str
) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(ValueError, match=says):
        read_trace(file)
    monkeypatch.setattr("sys.argv", ["trace", str(file)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_trace_of_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ran on a GPU"):
        read_trace(write(tmp_path / "t.json", ("cpu_op", "x", 0, 1)))
