"""Whether a plugin can be used on this machine: what it requires is installed, and its probe agrees."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

from packaging.requirements import Requirement

from tpserve.api.specs import Spec
from tpserve.plugins.discovery import AVAILABLE, Status
from tpserve.plugins.probe import run_probe

__all__ = ["PROBE_SECONDS", "check", "check_all", "check_requirements"]

PROBE_SECONDS = 60.0
"""How long a probe may take; long enough for a cold import of a large library."""


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


def check_all(specs: list[Spec], limit: float = PROBE_SECONDS) -> list[Status]:
    """Check many specs, up to four at a time."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(lambda spec: check(spec, limit), specs))


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
