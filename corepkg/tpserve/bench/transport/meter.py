"""What a process costs: CPU time and memory, counted where they belong."""

from __future__ import annotations

import time
from array import array
from contextlib import suppress
from pathlib import Path

__all__ = ["Memory", "Meter"]

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


class Meter:
    """The ends of rounds, and the CPU time of the whole process without what this thread does between rounds.

    Attributes:
        ends: when each round was over, in nanoseconds on the monotonic clock.
    """

    def __init__(self) -> None:
        self.ends = array("q")
        self._between = 0
        self._process = time.process_time_ns()
        self._left = time.thread_time_ns()

    def enter(self) -> None:
        """A round begins."""
        self._between += time.thread_time_ns() - self._left

    def leave(self) -> None:
        """A round is over."""
        self.ends.append(time.monotonic_ns())
        self._left = time.thread_time_ns()

    def cpu(self) -> float:
        """CPU seconds so far."""
        between = self._between + time.thread_time_ns() - self._left
        return (time.process_time_ns() - self._process - between) / 1e9


class Memory:
    """The most memory that this process holds from now on, where the system can count anew; else since its start."""

    def __init__(self) -> None:
        with suppress(OSError):
            CLEAR.write_text(RESET_PEAK)
        self._before = _status("VmRSS")

    def peak(self) -> int:
        """In bytes."""
        return _status("VmHWM")

    def grown(self) -> int:
        """How much more that is than at the beginning, in bytes."""
        return max(0, self.peak() - self._before)


def _status(key: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
