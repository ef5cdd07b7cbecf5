"""What a test must not leave behind: processes, threads, descriptors, temporary files."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["Belongings"]

GRACE = 3.0
"""Seconds that what is ending may take to end."""

TRACKER = "multiprocessing.resource_tracker"
"""A process that Python itself starts once, and keeps, with a pipe to it."""


class Belongings:
    """What this process has at one moment.

    Args:
        folder: for temporary files; empty at that moment.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes = set(_processes())
        self._threads = set(threading.enumerate())
        self._descriptors = _descriptors()

    def left(self) -> list[str]:
        """What has come since and is still there, in words; processes among it are killed."""
        deadline = time.monotonic() + GRACE
        gc.collect()
        while (found := list(self._new())) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in set(_processes()) - self._processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait(GRACE)
        return found

    def _new(self) -> Iterator[str]:
        for process in _processes():
            if process not in self._processes:
                yield f"process {process.pid} ({_title(process)})"
        for thread in threading.enumerate():
            if thread not in self._threads:
                yield f"thread {thread.name}"
        for number, target in _descriptors().items():
            if self._descriptors.get(number) != target:
                yield f"descriptor {number} ({target})"
        for path in self._folder.iterdir():
            yield f"file {path.name}"


def _processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if TRACKER not in _title(child)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "gone"


def _descriptors() -> dict[int, str]:
    """Open files, sockets and pipes; not what libraries wait with, which many open once for the whole process."""
    tracker = getattr(sys.modules.get(TRACKER), "_resource_tracker", None)
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 iterdir opens one more
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue
        if not target.startswith("anon_inode:") and int(name) != getattr(tracker, "_fd", None):
            found[int(name)] = target
    return found
