"""The processes that a test has started, by their titles."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def title(process: psutil.Process) -> str:
    """What ps calls it, without the arguments that a command line has; empty once it has ended."""
    with suppress(psutil.NoSuchProcess):  # what has ended and nobody has waited for yet is one too
        return next(iter(process.cmdline()), "")
    return ""


def by_name(processes: Iterable[psutil.Process]) -> dict[str, psutil.Process]:
    """Those that still run: by their titles, without ``tpserve:``."""
    return {name.removeprefix("tpserve: "): process for process in processes if (name := title(process))}
