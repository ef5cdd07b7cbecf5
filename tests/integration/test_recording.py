"""What servers and offline engines record can be decided again, also what a killed rank left."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.launched import Launched, wait_for

from tpserve import LLM, SamplingParams


@pytest.mark.slow
def test_each_generation_of_a_server_leaves_a_recording(
    runtime: Path, model: Path, tmp_path: Path, run_cli: Any
) -> None:
    record = tmp_path / "record"
    server = Launched(runtime, str(model), "--kv-tokens", "4096", "--tp", "2", "--record", str(record))
    try:
        server.await_ready()
        assert record.stat().st_mode & 0o777 == 0o600
        with ThreadPoolExecutor() as pool:
            before = record.stat().st_size
            asked = pool.submit(server.chat, max_tokens=400)
            wait_for(lambda: record.stat().st_size > before + 2000)
            server.children()["rank0"].kill()
            assert asked.result().json()["usage"]["completion_tokens"] == 400
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0, server.text
    finally:
        server.kill()
    for path in (record, Path(f"{record}.2")):
        done = run_cli("replay", str(path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "are decided alike by policy fcfs" in done.stdout


@pytest.mark.slow
def test_a_recording_that_cannot_be_written_ends_the_start(runtime: Path, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "record"
    server = Launched(runtime, str(model), "--kv-tokens", "4096", "--record", str(path))
    assert server.end() == 2
    assert f"error: {path}: there is no folder {path.parent}" in server.text
    assert "Traceback" not in server.text


def test_an_offline_engine_records_too(model: Path, tmp_path: Path, run_cli: Any) -> None:
    path = tmp_path / "record"
    with LLM(model, dtype="float32", threads=1, kv_tokens=4096, record=str(path)) as llm:
        llm.generate([[5, 6, 7], [8] * 40], SamplingParams(max_tokens=9, ignore_eos=True))
    done = run_cli("replay", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert " 2 requests, 18 tokens of " in done.stdout
