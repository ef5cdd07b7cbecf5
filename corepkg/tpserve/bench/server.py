"""Runs a server for as long as a benchmark needs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import IO, Any

import msgspec

from tpserve.errors import LaunchError

__all__ = ["composition", "serving"]

LAUNCH = (sys.executable, "-P", "-m", "tpserve.cli.main", "launch")
LEASHED = (sys.executable, "-P", "-m", "tpserve.bench.leash")
URL = re.compile(rb"https?://[\w.\[\]:]+:\d+")


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[str]:
    """Start ``tpserve launch`` on a free port, yield its URL when it is ready, and stop it afterwards.

    Should the thread that called end first, whatever way, the server stops too.

    Raises:
        LaunchError: it ended before it was ready; the message is what it said.
    """
    command = [*LEASHED, str(os.getpid()), "launch", *flags, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            yield _ready(process.stdout)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def composition(flags: Sequence[str]) -> dict[str, Any]:
    """What ``tpserve launch`` would be made of with these flags, as its ``--dry-run --json`` says.

    Raises:
        LaunchError: they are wrong; the message is what it said.
    """
    command = [*LAUNCH, *flags, "--dry-run", "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise _refused(done.stderr.splitlines())
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


def _ready(output: IO[bytes]) -> str:
    lines: list[bytes] = []
    try:
        for line in output:
            lines.append(line)
            if b"ready" in line and (found := URL.search(line)):
                return found.group().decode()
        raise _refused(lines)
    finally:
        Thread(target=output.read, daemon=True).start()


def _refused(lines: Sequence[bytes]) -> LaunchError:
    """What a server that did not start said of it: its error and hint, or else the last line."""
    said = [line.decode(errors="replace").strip() for line in lines if line.strip()]
    found = {key.lower(): text for key, colon, text in (line.partition(": ") for line in said) if colon}
    message = found.get("error") or (said[-1] if said else "it said nothing")
    return LaunchError(f"the server did not start: {message}", found.get("hint", ""))
