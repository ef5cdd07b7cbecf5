"""Where and with what a benchmark ran, for its report."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

__all__ = ["About", "about", "versions"]


class About(msgspec.Struct, frozen=True):
    """A machine and an installation at one moment.

    Attributes:
        date: when, in UTC.
        system: operating system and its version.
        cpu: the processor's name.
        cores: logical CPUs that this process may use.
        memory_gib: the machine's memory.
        load: processes that wanted to run on average, over the last 1, 5 and 15 minutes: others' too.
        versions: of what the figures depend on.
    """

    date: str
    system: str
    cpu: str
    cores: int
    memory_gib: float
    load: tuple[float, float, float]
    versions: dict[str, str]


def about(packages: Iterable[str]) -> About:
    """Describe this machine now, and these packages if they are installed."""
    return About(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        system=platform.platform(),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        load=os.getloadavg(),
        versions={"python": platform.python_version(), **versions(packages)},
    )


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
