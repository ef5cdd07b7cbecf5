"""Traces of servers: refused at the start if they cannot be written, and no reason to end later."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.integration.launched import Launched


@pytest.mark.slow
def test_a_folder_that_cannot_be_had_ends_the_start(runtime: Path, model: Path, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    server = Launched(runtime, str(model), "--kv-tokens", "4096", "--tp", "2", "--profile", str(taken))
    assert server.end() == 2
    assert server.text.count(f"error: no traces can be written in {taken}: Not a directory") == 1
    assert "Traceback" not in server.text


@pytest.mark.slow
def test_a_server_goes_on_without_traces_and_recordings(runtime: Path, model: Path, tmp_path: Path) -> None:
    """Also over a restart: a server that was ready does not depend on what people look at."""
    folder = tmp_path / "output"
    folder.mkdir()
    given = ["--profile", str(folder / "traces"), "--record", str(folder / "record")]
    server = Launched(runtime, str(model), "--kv-tokens", "4096", *given)
    try:
        server.await_ready()
        (folder / "traces").rmdir()
        (folder / "record").unlink()
        folder.rmdir()
        folder.touch()
        assert server.chat(max_tokens=100).json()["usage"]["completion_tokens"] == 100
        server.children()["rank0"].kill()
        server.await_ready(times=2)
        assert server.chat(max_tokens=100).json()["usage"]["completion_tokens"] == 100
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0, server.text
    finally:
        server.kill()
    assert server.text.count("[DP0 PP0 TP0] the trace") == 2, server.text
    assert server.text.count("nothing is recorded from here on") == 1
