"""Whether a plugin can be used on this machine: what it requires is installed, and its probe agrees."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from importlib import metadata
from threading import BoundedSemaphore, Thread

from packaging.requirements import Requirement

from tpserve.api.specs import Spec
from tpserve.plugins.discovery import AVAILABLE, Status
from tpserve.plugins.probe import run_probe

__all__ = ["PROBE_SECONDS", "check", "check_all", "check_requirements"]

PROBE_SECONDS = 60.0
"""How long a probe may take; long enough for a cold import of a large library."""

AT_A_TIME = 4

SOON = 3.0
"""Seconds after which somebody may want to know what takes so long."""


def check_requirements(requires: Iterable[str]) -> Status:
    """Compare requirement strings with installed metadata; nothing is imported."""
    missing = [(text, found) for text in requires if (found := _unmet(Requirement(text))) is not None]
    if not missing:
        return AVAILABLE
    reason = "; ".join(f"needs {text}, {found}" for text, found in missing)
    wanted = " ".join(f"'{text}'" for text, _ in missing)
    return Status("unavailable", reason, f"pip install {wanted}")


def check(spec: Spec, limit: float = PROBE_SECONDS) -> Status:
    """Compare the requirements, then run the probe in a child process that has ``limit`` seconds."""
    status = check_requirements(spec.requires)
    if status is not AVAILABLE or not spec.probe:
        return status
    reason = run_probe(spec.probe, limit)
    return AVAILABLE if reason is None else Status("unavailable", reason)


def check_all(
    specs: list[Spec], limit: float = PROBE_SECONDS, waiting: Callable[[list[str]], None] = lambda names: None
) -> list[Status]:
    """Check many specs, up to four at a time.

    Args:
        specs: to check.
        limit: seconds that each probe has.
        waiting: told the names of those whose probes have not answered after a few seconds.
    """
    statuses: dict[int, Status] = {}
    few = BoundedSemaphore(AT_A_TIME)

    def run(number: int) -> None:
        with few:
            statuses[number] = check(specs[number], limit)

    # Daemons, so that who interrupts this need not wait for them; their probes end with this process.
    threads = [Thread(target=run, args=(number,), daemon=True) for number in range(len(specs))]
    for thread in threads:
        thread.start()
    soon = time.monotonic() + SOON
    for thread in threads:
        thread.join(max(0.0, soon - time.monotonic()))
    late = [f"{spec.kind}.{spec.name}" for spec, thread in zip(specs, threads, strict=True) if thread.is_alive()]
    if late:
        waiting(late)
    for thread in threads:
        thread.join()
    return [statuses[number] for number in range(len(specs))]


def _unmet(requirement: Requirement) -> str | None:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "which is not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"but {version} is installed"
