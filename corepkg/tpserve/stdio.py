"""The three standard streams, made fit for processes that run long after whoever started them has gone."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["open_descriptors", "secure_streams"]


def secure_streams() -> None:
    """Make all three streams usable: what is no character is escaped, and standard error loses what cannot be written.

    To be called before anything opens a file: see :func:`open_descriptors`. A terminal that is closed, a reader that
    has left or a full disk then costs the log, and no more.
    """
    open_descriptors()
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is sys.__stderr__:  # what somebody has put in its place is not ours to change
        errors = io.BufferedWriter(_Lossy(2, "w", closefd=False))
        encoding = sys.stderr.encoding if sys.stderr else "utf-8"
        sys.stderr = io.TextIOWrapper(errors, encoding, "backslashreplace", line_buffering=True)


def open_descriptors() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed on /dev/null.

    Otherwise the next socket or file gets such a number, and what is meant for a standard stream reaches it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(descriptor, True)


class _Lossy(io.FileIO):
    """A file that takes all that is written to it and drops what it cannot store."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write what can be written; all of it counts as written."""
        try:
            return super().write(data) or memoryview(data).nbytes
        except OSError:
            return memoryview(data).nbytes
