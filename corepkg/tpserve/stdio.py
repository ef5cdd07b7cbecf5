"""The three standard streams, made fit for processes that run long after whoever started them has gone."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TYPE_CHECKING

from tpserve.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["open_descriptors", "secure_streams"]


def secure_streams() -> None:
    """Make all three streams usable: what is no character is escaped, and what cannot be written is dealt with.

    To be called before anything opens a file: see :func:`open_descriptors`. A terminal that is closed, a reader that
    has left or a full disk then costs the log, and no more. Standard output, which holds results, raises a ConfigError
    where its disk is full, and ends the process quietly where its reader has left.
    """
    open_descriptors()
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is sys.__stdout__:  # what somebody has put in its place is not ours to change
        is_terminal = os.isatty(1)
        encoding = sys.stdout.encoding if sys.stdout else "utf-8"
        results = io.BufferedWriter(_Results(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(results, encoding, "backslashreplace", line_buffering=is_terminal)
    if sys.stderr is sys.__stderr__:
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


class _Results(io.FileIO):
    """A file whose first failure is told in one line, and the last that there is."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write what can be written.

        Raises:
            SystemExit: whoever read it has had enough: the end of any tool, though with time to tidy up.
            ConfigError: it cannot be written for another reason; what comes afterwards is dropped.
        """
        try:
            return super().write(data)
        except OSError as error:
            # What is still buffered would fail once more at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):
                raise SystemExit(128 + signal.SIGPIPE) from None
            raise ConfigError(f"standard output cannot be written: {error.strerror}") from None


class _Lossy(io.FileIO):
    """A file that takes all that is written to it and drops what it cannot store."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write what can be written; all of it counts as written."""
        try:
            return super().write(data) or memoryview(data).nbytes
        except OSError:
            return memoryview(data).nbytes
