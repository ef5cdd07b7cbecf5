"""Runs a server for as long as a benchmark needs it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import IO

from tpserve.errors import LaunchError

__all__ = ["serving"]

URL = re.compile(rb"https?://[\w.\[\]:]+:\d+")


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[str]:
    """Start ``tpserve launch`` on a free port, yield its URL when it is ready, and stop it afterwards.

    Raises:
        LaunchError: it ended before it was ready; the message is the end of its output.
    """
    command = [sys.executable, "-m", "tpserve.cli.main", "launch", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            yield _ready(process.stdout)
        finally:
            process.send_signal(signal.SIGINT)


def _ready(output: IO[bytes]) -> str:
    lines: list[bytes] = []
    for line in output:
        lines.append(line)
        if b"ready" in line and (found := URL.search(line)):
            Thread(target=output.read, daemon=True).start()
            return found.group().decode()
    raise LaunchError("the server did not start: " + b"".join(lines[-5:]).decode(errors="replace").strip())
