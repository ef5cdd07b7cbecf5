from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.profiler import profile

from tpserve.engine.profiled import STEPS, WAIT, ProfiledEngine, check_folder
from tpserve.errors import ConfigError
from tpserve.testing.engine import generate

NEEDED = WAIT + STEPS + 2


def test_a_trace_is_of_steady_steps_of_the_largest_batch(small_model: Any, make_engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "traces" / "rank0.json"
    check_folder(path.parent)
    engine = ProfiledEngine(make_engine(small_model("qwen3")), path)
    prompts = [[5, 6, 7], [8, 9], [10]]
    plain = generate(make_engine(small_model("qwen3")), prompts, NEEDED)

    generate(engine, prompts, NEEDED - 4)
    assert not path.exists()
    assert generate(engine, prompts[:2], NEEDED) == plain[:2]
    trace = msgspec.json.decode(path.read_bytes())["traceEvents"]
    assert sum(each.get("name") == "aten::embedding" for each in trace) == STEPS

    path.unlink()
    generate(engine, prompts[:2], NEEDED)
    assert not path.exists()
    assert generate(engine, prompts, NEEDED) == plain
    assert path.exists()
    assert [*path.parent.iterdir()] == [path]
    engine.close()


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/traces", "/proc/traces", "/proc"])
def test_a_folder_that_cannot_be_had_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=f"no traces can be written in {folder}: "):
        check_folder(Path(folder))


def full(_: profile, path: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken(_: profile, path: str) -> None:
    raise RuntimeError("no room")


def silent(_: profile, path: str) -> None:
    Path(f"{path}.tmp").write_text('{"traceEv')


def cut(_: profile, path: str) -> None:
    Path(path).write_text('{"traceEv')


@pytest.mark.parametrize("export", [full, broken, silent, cut])
def test_a_trace_that_cannot_be_written_ends_the_tracing_and_nothing_else(
    small_model: Any,
    make_engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    export: Callable[[profile, str], None],
) -> None:
    path = tmp_path / "rank0.json"
    path.write_text("an earlier one")
    engine = ProfiledEngine(make_engine(small_model("qwen3")), path)
    prompts = [[5, 6, 7], [8, 9]]
    plain = generate(make_engine(small_model("qwen3")), prompts, NEEDED)
    monkeypatch.setattr(profile, "export_chrome_trace", export)
    assert generate(engine, prompts[:1], NEEDED) == plain[:1]
    assert generate(engine, prompts, NEEDED) == plain
    (warning,) = caplog.records
    assert f"the trace {path} cannot be written" in warning.getMessage()
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "an earlier one"
    engine.close()
