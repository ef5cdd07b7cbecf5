"""Where and with what a benchmark ran, for its report."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec
import psutil
from packaging.requirements import Requirement

__all__ = ["About", "about", "needed_by", "versions"]

GIT_SECONDS = 10


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
        commit: of the checkout that tpserve runs from, with ``+`` behind it if files differ; empty if it is installed.
    """

    date: str
    system: str
    cpu: str
    cores: int
    memory_gib: float
    load: tuple[float, float, float]
    versions: dict[str, str]
    commit: str = ""


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
        commit=_commit(),
    )


def needed_by(packages: Iterable[str]) -> set[str]:
    """These packages and all that they name as requirements."""
    found = set(packages)
    for package in tuple(found):
        with suppress(metadata.PackageNotFoundError):
            found.update(Requirement(text).name for text in metadata.requires(package) or ())
    return found


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    if not _git("ls-files", Path(__file__).name):
        return ""
    return _git("describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*")


def _git(*arguments: str) -> str:
    """What git says of the folder that this file is in; nothing if it cannot."""
    command = ("git", "-C", str(Path(__file__).parent), *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
