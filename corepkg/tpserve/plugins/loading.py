"""Importing a plugin's light module and checking what it says of itself."""

from __future__ import annotations

import ast
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import util
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec
import pluggy
from packaging.requirements import InvalidRequirement, Requirement

from tpserve.api.hooks import HOOKS, HookSpecs
from tpserve.api.specs import API_VERSION, KINDS, Options, Spec
from tpserve.plugins.discovery import Entry, Status

__all__ = ["BadPlugin", "load_spec", "stated_api"]

IMPORT_SECONDS = 20.0
"""How long a light module may take."""

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class BadPlugin(Exception):
    """A plugin that cannot be loaded, with the status to list it under."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.reason)
        self.status = status


def load_spec(entry: Entry) -> Spec:
    """Import an entry's module and return the spec that it names.

    Raises:
        BadPlugin: whatever is wrong with it; nothing else escapes from the plugin's code.
    """
    try:
        with _contained():
            _check_api(entry, _read_api(entry.module))
            module = importlib.import_module(entry.module)
            specs = _call_hook(entry, module)
    except BadPlugin:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        reason = f"{entry.module}: {type(error).__name__}: {_one_line(error)}"
        raise BadPlugin(Status("broken", reason, f"Reinstall or upgrade {entry.distribution}")) from error
    spec = _pick(entry, specs)
    _check_spec(spec)
    return spec


def stated_api(entry: Entry) -> int | None:
    """The plugin API that an entry's module states, or None if none can be read."""
    try:
        with _contained():
            stated = _read_api(entry.module) if entry.problem is None else None
    except (Exception, SystemExit, KeyboardInterrupt):  # noqa: BLE001 - finding a module imports its package, which may do anything
        return None
    return stated if type(stated) is int else None


@contextmanager
def _contained() -> Iterator[None]:
    """Run a plugin's code.

    What it prints is not among the command's results, os._exit does not end the command, and nothing takes for ever.
    """
    pid, leave = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != pid:  # in a process that the plugin has forked
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse
    try:
        with redirect_stdout(sys.stderr), _limited():
            yield
    finally:
        os._exit = leave


@contextmanager
def _limited() -> Iterator[None]:
    """Give up what does not end, where that can be done: in the main thread, with an alarm that nobody else has set."""
    is_ours = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and not any(signal.getitimer(signal.ITIMER_REAL))
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> NoReturn:
        raise _broken(f"its import took longer than {IMPORT_SECONDS:g} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, IMPORT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _read_api(module: str) -> object:
    """The literal TPSERVE_API in a module's source: read before the import, which another API's names may fail."""
    found = util.find_spec(module)
    if found is None:
        raise ModuleNotFoundError("no such module")
    for node in ast.parse(_source(found), found.origin or "<unknown>").body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="TPSERVE_API")], value=ast.Constant(value=version))
                | ast.AnnAssign(target=ast.Name(id="TPSERVE_API"), value=ast.Constant(value=version))
            ):
                return version
    return None


def _source(found: ModuleSpec) -> str | bytes:
    """A module's source; a loader that is not made for looking, as pytest's is not, has at least a file."""
    if isinstance(found.loader, InspectLoader):
        return found.loader.get_source(found.name) or ""
    return Path(found.origin).read_bytes() if found.has_location and found.origin else ""


def _check_api(entry: Entry, stated: object) -> None:
    if stated is None:
        reason = f"{entry.module} states no plugin API; this tpserve has version {API_VERSION}"
        raise BadPlugin(Status("incompatible", reason, f"Its author must add TPSERVE_API = {API_VERSION}"))
    if type(stated) is not int or stated != API_VERSION:
        reason = f"written for plugin API {stated!r}; this tpserve has version {API_VERSION}"
        hint = f"Upgrade {'tpserve' if isinstance(stated, int) and stated > API_VERSION else entry.distribution}"
        raise BadPlugin(Status("incompatible", reason, hint))


def _call_hook(entry: Entry, module: ModuleType) -> list[Any]:
    """Call the module's hook for the entry's kind, through a plugin manager that holds this module only."""
    manager = pluggy.PluginManager("tpserve")
    manager.add_hookspecs(HookSpecs)
    manager.register(module, entry.module)
    manager.check_pending()
    results = getattr(manager.hook, HOOKS[entry.kind])()
    return [spec for result in results for spec in result]


def _pick(entry: Entry, specs: list[Any]) -> Spec:
    hook, wanted = HOOKS[entry.kind], KINDS[entry.kind]
    for spec in specs:
        if not isinstance(spec, wanted):
            raise _broken(f"{hook} of {entry.module} must return {wanted.__name__}, found {type(spec).__name__}")
    named = [spec for spec in specs if spec.name == entry.name]
    if len(named) != 1:
        names = ", ".join(str(spec.name) for spec in specs) or "none"
        raise _broken(f"{hook} of {entry.module} must return one spec named {entry.name!r}, found: {names}")
    return named[0]  # type: ignore[no-any-return]


def _check_spec(spec: Spec) -> None:
    """Refuse a spec that a later step would trip over."""
    try:
        msgspec.convert(msgspec.structs.asdict(spec), type(spec), strict=True)
    except msgspec.ValidationError as error:
        raise _broken(f"its spec is wrong: {error}") from None
    if not spec.summary or "\n" in spec.summary:
        raise _broken("its summary must be one line")
    if not _REFERENCE.fullmatch(spec.factory):
        raise _broken(f"its factory must be 'package.module:Class', found {spec.factory!r}")
    if spec.probe and not _REFERENCE.fullmatch(spec.probe):
        raise _broken(f"its probe must be 'package.module:function', found {spec.probe!r}")
    for text in spec.requires:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            raise _broken(f"its requirement {text!r} is wrong: {_one_line(error)}") from None
    _check_options(spec.options)


def _check_options(options: type[Options]) -> None:
    if not (isinstance(options, type) and issubclass(options, Options)):
        raise _broken(f"its options must be a subclass of tpserve.api.Options, found {options!r}")
    without = [field.name for field in msgspec.structs.fields(options) if field.required]
    if without:
        raise _broken(f"options without a default: {', '.join(without)}")


def _broken(reason: str) -> BadPlugin:
    return BadPlugin(Status("broken", reason))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
