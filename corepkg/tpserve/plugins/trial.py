"""Importing plugins in children first: an import may crash, leave or hang, and nothing but its own child is lost."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from tpserve.parent import die_with_parent
from tpserve.plugins import loading
from tpserve.plugins.discovery import Entry, Status
from tpserve.plugins.loading import BadPlugin, load_spec, stated_api

__all__ = ["Trial", "can_try", "try_imports"]

logger = logging.getLogger(__name__)

SOON = 1.0
"""Seconds after which somebody may want to know what takes so long."""


class Trial(msgspec.Struct, frozen=True):
    """What came of importing an entry's module.

    Attributes:
        api: the plugin API that the module states, or None if none could be read.
        failure: the status to list the entry under, or None if its import is worth repeating here.
    """

    api: int | None = None
    failure: Status | None = None


def can_try() -> bool:
    """Whether this process may fork: a library's thread that held a lock would hold it for ever in the child."""
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False


def try_imports(entries: Iterable[Entry]) -> dict[Entry, Trial]:
    """Import the entries' modules, each in a child of its own and all side by side.

    What takes long is logged, and ended at the limit of imports.
    """
    modules: dict[str, list[Entry]] = {}
    for entry in entries:
        modules.setdefault(entry.module, []).append(entry)
    limit, start = loading.IMPORT_SECONDS, time.monotonic()
    children: list[_Child] = []
    try:
        children.extend(map(_Child, modules.values()))
        if late := _wait(children, start + SOON):
            names = ", ".join(entry.key for child in late for entry in child.entries)
            logger.warning("waiting for the import of %s, %g s at most", names, limit)
            _wait(late, start + limit)
    finally:
        for child in children:
            child.end()
    return {entry: trial for child in children for entry, trial in child.trials(limit)}


def _wait(children: list[_Child], until: float) -> list[_Child]:
    return [child for child in children if not child.has_ended(until)]


class _Child:
    """A process that imports one module and says what came of it: the stated API, then a status for each entry."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self._said = b""
        self._is_silent = True
        self._exit_code: int | None = None
        self._reader, writer = os.pipe()
        starter = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _act(entries, writer, starter)
        os.close(writer)

    def has_ended(self, until: float) -> bool:
        """Hear what it says until it has no more to say, or this time of the monotonic clock."""
        while self._is_silent and select.select([self._reader], [], [], max(0.0, until - time.monotonic()))[0]:
            heard = os.read(self._reader, 1 << 16)
            self._said += heard
            # What the import has forked may hold the other end open, after the last line too.
            self._is_silent = bool(heard) and self._said.count(b"\n") < 2
        return not self._is_silent

    def end(self) -> None:
        """Kill it, if it has not ended, and whatever it has started."""
        os.close(self._reader)
        for kill in (os.kill, os.killpg):  # it may not have got as far as to have a group
            with suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # who ignores SIGCHLD is not told how its children end
            self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def trials(self, limit: float) -> list[tuple[Entry, Trial]]:
        """What came of it."""
        lines = self._said.splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        api = json.loads(whole[0]) if whole else None
        failures: list[Status | None] = [Status("broken", self._end(limit))] * len(self.entries)
        if len(whole) == 2:
            failures = msgspec.convert(json.loads(whole[1]), list[Status | None])
        return [(entry, Trial(api, failure)) for entry, failure in zip(self.entries, failures, strict=True)]

    def _end(self, limit: float) -> str:
        if self._is_silent:
            return f"its import took longer than {limit:g} s"
        if self._exit_code is None:
            return "its import ended the process"
        if self._exit_code < 0:
            return f"its import ended the process with signal {signal.Signals(-self._exit_code).name}"
        return f"its import ended the process with exit code {self._exit_code}"


def _act(entries: list[Entry], writer: int, starter: int) -> NoReturn:
    """The child: nothing of it is seen or heard but what it says."""
    leave = os._exit
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() != starter:
            leave(1)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        with open(writer, "wb", buffering=0) as out:
            out.write(_line(stated_api(entries[0])))
            out.write(_line([_failure(entry) for entry in entries]))
    finally:
        leave(0)


def _failure(entry: Entry) -> Status | None:
    try:
        load_spec(entry)
    except BadPlugin as error:
        return error.status
    return None


def _line(value: object) -> bytes:
    """As JSON, which msgspec does not make of a reason with half a character in it."""
    return json.dumps(msgspec.to_builtins(value)).encode() + b"\n"
