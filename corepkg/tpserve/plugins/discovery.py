"""What installed distributions offer, read from their metadata alone: nothing of theirs is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from typing import Literal

import msgspec

from tpserve.api.hooks import ENTRY_POINT_GROUP
from tpserve.api.specs import KINDS
from tpserve.values import did_you_mean

__all__ = ["AVAILABLE", "NAME", "RESERVED", "Entry", "Status", "discover"]

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
"""The form of a plugin's name."""

RESERVED = ("ancestor", "auto")
"""Words that mean something else where a plugin is chosen."""

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

State = Literal["available", "unavailable", "broken", "conflict", "incompatible"]


class Status(msgspec.Struct, frozen=True):
    """Whether a plugin can be used.

    Attributes:
        state: ``available``; ``unavailable`` on this machine; ``broken``: its package must change; ``conflict``: two
            distributions offer it; ``incompatible``: it was written for another plugin API.
        reason: why, in one line; empty if available.
        hint: what to do about it, in one line; may be empty.
    """

    state: State
    reason: str = ""
    hint: str = ""


AVAILABLE = Status("available")


class Entry(msgspec.Struct, frozen=True):
    """One entry point.

    Attributes:
        kind: the part before the dot; not always a kind that exists.
        name: the part after it.
        module: the light module that it points at.
        distribution: who provides it.
        version: the distribution's version.
        problem: what the metadata alone shows to be wrong, or None.
    """

    kind: str
    name: str
    module: str
    distribution: str
    version: str
    problem: Status | None = None

    @property
    def key(self) -> str:
        """``kind.name``."""
        return f"{self.kind}.{self.name}" if self.name else self.kind


def discover() -> list[Entry]:
    """List every entry point of the group, by kind, name and distribution; wrong ones carry a problem."""
    entries = [entry for distribution in _distributions() for entry in _entries_of(distribution)]
    providers: dict[str, list[str]] = {}
    for entry in entries:
        providers.setdefault(entry.key, []).append(f"{entry.distribution} {entry.version}")
    kinds = list(KINDS)
    order = {kind: place for place, kind in enumerate(kinds)}
    return sorted(
        (_mark_conflict(entry, sorted(providers[entry.key])) for entry in entries),
        key=lambda entry: (order.get(entry.kind, len(kinds)), entry.kind, entry.name, entry.distribution),
    )


def _distributions() -> Iterator[metadata.Distribution]:
    """Each distribution once: the first on the path hides later ones of the same name, as importing does."""
    seen: set[str] = set()
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", _name(distribution)).lower()
        if name not in seen:
            seen.add(name)
            yield distribution


def _name(distribution: metadata.Distribution) -> str:
    try:
        return distribution.metadata["Name"] or "unknown"
    except UnicodeDecodeError:
        return "unknown"


def _entries_of(distribution: metadata.Distribution) -> Iterator[Entry]:
    name, version = _name(distribution), "unknown"
    try:
        if f"[{ENTRY_POINT_GROUP}]" not in (distribution.read_text("entry_points.txt") or ""):
            return
        version = distribution.metadata["Version"] or version
        points = list(distribution.entry_points.select(group=ENTRY_POINT_GROUP))
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one package's metadata, the others still count
        problem = Status("broken", f"its metadata cannot be read: {error}", f"Reinstall {name}")
        yield Entry("?", "", "", name, version, problem)
        return
    for point in points:
        kind, _, plugin = point.name.partition(".")
        yield Entry(kind, plugin, point.value, name, version, _problem(kind, plugin, point))


def _problem(kind: str, name: str, point: metadata.EntryPoint) -> Status | None:
    if not NAME.fullmatch(name):
        return Status("broken", f"the entry point {point.name!r} is not named kind.name")
    if kind not in KINDS:
        return Status("broken", f"there is no kind {kind!r}", did_you_mean(kind, KINDS, what="Kinds"))
    if name in RESERVED:
        return Status("broken", f"{name!r} cannot be a plugin's name: flags give it another meaning")
    if not _MODULE.fullmatch(point.value):
        return Status("broken", f"the entry point {point.name!r} must name a module, found {point.value!r}")
    return None


def _mark_conflict(entry: Entry, providers: list[str]) -> Entry:
    if len(providers) < 2 or entry.problem is not None:
        return entry
    problem = Status("conflict", f"provided by {' and by '.join(providers)}", "Uninstall all but one of them")
    return msgspec.structs.replace(entry, problem=problem)
