"""``tpserve launch`` as a process that tests can look into, signal and wait for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TypeVar

import httpx
import psutil
from tests.processes import by_name

__all__ = ["HANG", "Launched", "wait_for"]

HANG = 120.0
"""Seconds after which a test gives up on what it waits for."""

T = TypeVar("T")


class Launched:
    """A server.

    Args:
        runtime: stands for XDG_RUNTIME_DIR: private and with a short path.
        flags: the command line behind ``tpserve launch --port 0``.
        python: the interpreter of the environment to take it from.

    Attributes:
        process: the supervisor.
        base: where its run directory is.
        log: its standard error, line by line.
    """

    def __init__(self, runtime: Path, *flags: str, python: str | Path = sys.executable) -> None:
        self.base = runtime / "tpserve"
        self.log: list[str] = []
        self._seen: dict[int, psutil.Process] = {}
        self._run_ids: set[str] = set()
        self._times_ready = 0
        self.process = subprocess.Popen(
            [str(python), "-m", "tpserve.cli.main", "launch", "--port", "0", *flags],
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def await_ready(self, times: int = 1) -> None:
        """Wait until it has said so often that it is ready."""
        wait_for(lambda: self._times_ready >= times or not self._reader.is_alive())
        assert self._times_ready >= times, self.text
        self.children()

    @property
    def url(self) -> str:
        """Where clients go."""
        found = re.search(r"ready at (http://\S+) in", self.text)
        assert found, self.text
        return found[1]

    @property
    def text(self) -> str:
        """All of the log."""
        return "".join(self.log)

    def children(self) -> dict[str, psutil.Process]:
        """The processes that run now, by name."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self._seen.update({child.pid: child for child in children})
        self._run_ids.update(self._directories())
        return by_name(children)

    def await_child(self, name: str) -> psutil.Process:
        """Wait for a process to have got its name."""
        return wait_for(lambda: self.children().get(name))

    def health(self) -> int:
        """The status of /health."""
        return httpx.get(f"{self.url}/health", timeout=HANG).status_code

    def chat(self, content: str = "Hello", max_tokens: int = 8) -> httpx.Response:
        """Ask for a completion of a short conversation, greedily."""
        model = httpx.get(f"{self.url}/v1/models", timeout=HANG).json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=HANG)

    def sample(self, name: str) -> float:
        """The number that /metrics has for a series without labels."""
        found = re.search(rf"^{name} (\S+)$", httpx.get(f"{self.url}/metrics", timeout=HANG).text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def end(self) -> int:
        """Wait for the end: the exit code. None of the processes that were seen may be left."""
        code = self.process.wait(HANG)
        self._reader.join(HANG)
        _gone, alive = psutil.wait_procs(self._seen.values(), timeout=5)
        assert not alive
        return code

    def left(self) -> list[str]:
        """Run directories and shared memory that are still there."""
        segments = [path for name in self._run_ids for path in Path("/dev/shm").glob(f"tpserve-{name}-*")]
        return self._directories() + [path.name for path in segments]

    def _directories(self) -> list[str]:
        return [path.name for path in self.base.iterdir() if path.is_dir()] if self.base.exists() else []

    def kill(self) -> None:
        """End it whatever it does."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            self._times_ready += line.startswith("ready at ")


def wait_for(condition: Callable[[], T | None]) -> T:
    """Poll until the condition holds; what it then returned."""
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("waited in vain")
