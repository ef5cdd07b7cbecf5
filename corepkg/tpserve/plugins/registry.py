"""The parts that can be chosen: found by metadata, loaded and checked when they are asked for.

registry = Registry.discover()
plugin = registry.load("transport", "zmq")
transport = plugin.factory()(plugin.make_options({"send_buffer": "8192"}))
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from tpserve.api import Attention, Comm, Ops, Options, Policy, Spec, Sync, Transport
from tpserve.errors import ConfigError, PluginConflict, PluginError, UnavailablePlugin, UnknownPlugin
from tpserve.plugins.availability import PROBE_SECONDS, check, check_all, check_requirements
from tpserve.plugins.discovery import AVAILABLE, Entry, Status, discover
from tpserve.plugins.loading import BadPlugin, load_spec, stated_api
from tpserve.plugins.trial import Trial, can_try, try_imports
from tpserve.values import convert, did_you_mean

__all__ = ["INTERFACES", "Entry", "Plugin", "Registry", "Status", "look_elsewhere"]

INTERFACES: dict[str, type] = {
    "transport": Transport,
    "sync": Sync,
    "policy": Policy,
    "attention": Attention,
    "ops": Ops,
    "comm": Comm,
}
"""What the class of a plugin of each kind derives from."""


class Plugin(msgspec.Struct, frozen=True):
    """A plugin whose module has been imported and whose spec has been checked.

    Attributes:
        entry: where it was found.
        spec: what it says of itself.
    """

    entry: Entry
    spec: Spec

    @property
    def kind(self) -> str:
        """Its kind."""
        return self.entry.kind

    @property
    def name(self) -> str:
        """Its name, unique in its kind."""
        return self.entry.name

    def make_options(self, values: Mapping[str, Any]) -> Options:
        """Build the plugin's options from what a person wrote; fields not named keep their defaults.

        Raises:
            ConfigError: an unknown field or a value of the wrong type; the message names plugin and field.
        """
        typed = {name: self.convert_option(name, value) for name, value in values.items()}
        try:
            return self.spec.options(**typed)
        except (TypeError, ValueError) as error:  # raised by a __post_init__ that compares fields
            raise ConfigError(f"options of {self.entry.key}: {error}") from error

    def convert_option(self, name: str, value: Any) -> Any:
        """Turn what a person wrote for one option into its type.

        Raises:
            ConfigError: as for :meth:`make_options`.
        """
        fields = self._option_types()
        if name not in fields:
            raise ConfigError(
                f"{self.entry.key} has no option {name!r}", did_you_mean(name, fields, what="Its options")
            )
        try:
            return convert(value, fields[name])
        except ValueError as error:
            raise ConfigError(f"option {self.entry.key}.{name}: {error}") from None

    def objection(self, name: str, value: Any) -> str | None:
        """Why a value cannot be that of one of its options; None if it can."""
        try:
            convert(value, self._option_types()[name])
        except ValueError as error:
            return str(error)
        return None

    def _option_types(self) -> dict[str, Any]:
        return {field.name: field.type for field in msgspec.structs.fields(self.spec.options)}

    def factory(self) -> type[Any]:
        """Import the class that does the work.

        Raises:
            UnavailablePlugin: its module cannot be imported on this machine.
            PluginError: there is no such class, or it does not implement the kind's interface.
        """
        module_name, _, class_name = self.spec.factory.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            # Large libraries fail on import in many ways (a driver, an assertion), and all mean: not on this machine.
            reason = f"importing {module_name} failed: {type(error).__name__}: {' '.join(str(error).split())}"
            raise UnavailablePlugin(f"{self.entry.key} is unavailable: {reason}", look_elsewhere(self.kind)) from error
        found = getattr(module, class_name, None)
        base = INTERFACES[self.kind]
        if not (isinstance(found, type) and issubclass(found, base)):
            raise PluginError(
                f"{self.entry.key}: {self.spec.factory} must be a subclass of tpserve.api.{base.__name__}",
                _fault(self.entry),
            )
        return found


class Registry:
    """The plugins that installed distributions offer.

    Args:
        entries: what was discovered.
        probe_limit: seconds that a plugin's probe may take.
    """

    def __init__(self, entries: list[Entry], probe_limit: float = PROBE_SECONDS) -> None:
        self._entries = entries
        self._probe_limit = probe_limit
        self._checked: dict[tuple[tuple[str, ...], str], Status] = {}
        self._trials: dict[Entry, Trial] = {}

    @classmethod
    def discover(cls, probe_limit: float = PROBE_SECONDS) -> Registry:
        """Read what is installed; imports nothing of it and never fails because of it."""
        return cls(discover(), probe_limit)

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Every entry point, of one kind or of all, in a stable order; a conflict appears once a provider."""
        return [entry for entry in self._entries if kind in (None, entry.kind)]

    def load(self, kind: str, name: str, *, probe: bool = True) -> Plugin:
        """Import and check the plugin of this kind and name.

        Args:
            kind: a kind.
            name: a plugin's name.
            probe: whether to try its import and run its probe, in child processes; ranks skip it, their supervisor
                has done it.

        Raises:
            UnknownPlugin: there is none; the hint lists those that there are.
            PluginConflict: two distributions provide it.
            UnavailablePlugin: it cannot run on this machine.
            PluginError: it is broken, or written for another plugin API.
        """
        entry = self._find(kind, name)
        if probe:
            self._try_imports([entry])
        plugin = self._describe(entry)
        status = self._check(plugin.spec) if probe else check_requirements(plugin.spec.requires)
        if status is not AVAILABLE:
            raise UnavailablePlugin(
                f"{plugin.entry.key} is unavailable: {status.reason}", status.hint or look_elsewhere(kind)
            )
        return plugin

    def describe(self, entry: Entry) -> Plugin:
        """Import and check a plugin, whether or not it can run here.

        Raises:
            PluginConflict, PluginError: as for :meth:`load`.
        """
        self._try_imports([entry])
        return self._describe(entry)

    def stated_api(self, entry: Entry) -> int | None:
        """The plugin API that an entry's module states, or None if none can be read."""
        self._try_imports([entry])
        trial = self._trials.get(entry)
        return stated_api(entry) if trial is None else trial.api

    def _describe(self, entry: Entry) -> Plugin:
        try:
            return self._import(entry)
        except BadPlugin as error:
            status = error.status
            kind = PluginConflict if status.state == "conflict" else PluginError
            word = "ambiguous" if kind is PluginConflict else status.state
            raise kind(f"{entry.key} is {word}: {status.reason}", status.hint or _fault(entry)) from error

    def check_option(self, kind: str, name: str | None, field: str, value: Any) -> None:
        """Check an option that somebody has set, whether or not its plugin is going to be used.

        Args:
            kind: a kind.
            name: a plugin's name; None for an option of the kind as a whole, which one plugin at least must have.
            field: the option.
            value: what was written.

        Raises:
            ConfigError: no such option, or a value of the wrong type.
            UnknownPlugin, PluginConflict, PluginError: the plugin that is named cannot be asked.
        """
        if name is not None:
            self.describe(self._find(kind, name)).convert_option(field, value)
            return
        self._try_imports(self.entries(kind))
        plugins = [plugin for entry in self.entries(kind) if (plugin := self._try(entry)) is not None]
        named = [plugin for plugin in plugins if field in plugin.spec.options.__struct_fields__]
        if not named:
            known = sorted({field for plugin in plugins for field in plugin.spec.options.__struct_fields__})
            raise ConfigError(f"no {kind} has an option {field!r}", did_you_mean(field, known, what="Their options"))
        reasons = [reason for plugin in named if (reason := plugin.objection(field, value)) is not None]
        if len(reasons) == len(named):
            raise ConfigError(f"option {kind}.{field}: {reasons[0]}")

    def status(self, entry: Entry) -> Status:
        """Whether a plugin can be used; raises nothing that the plugin raises."""
        return self.statuses([entry])[0]

    def statuses(self, entries: list[Entry], waiting: Callable[[list[str]], None] = lambda names: None) -> list[Status]:
        """The status of each entry, in order; probes run side by side, and ``waiting`` is told which take long."""
        self._try_imports(entries)
        found: list[Status | Plugin] = []
        for entry in entries:
            try:
                found.append(self._import(entry))
            except BadPlugin as error:
                found.append(error.status)
        specs = [item.spec for item in found if isinstance(item, Plugin)]
        checked = iter(check_all(specs, self._probe_limit, waiting))
        return [item if isinstance(item, Status) else next(checked) for item in found]

    def _check(self, spec: Spec) -> Status:
        """Whether a part can be used; what several parts ask for together is looked up once."""
        asked = (spec.requires, spec.probe)
        if asked not in self._checked:
            self._checked[asked] = check(spec, self._probe_limit)
        return self._checked[asked]

    def _try_imports(self, entries: Iterable[Entry]) -> None:
        """See what comes of importing plugins of others, which may do anything, where that can be done."""
        untried = [
            entry
            for entry in entries
            if entry.problem is None
            and entry.distribution != "tpserve"
            and entry.module not in sys.modules
            and entry not in self._trials
        ]
        if untried and can_try():
            self._trials |= try_imports(untried)

    def _import(self, entry: Entry) -> Plugin:
        failure = entry.problem or self._trials.get(entry, Trial()).failure
        if failure is not None:
            raise BadPlugin(failure)
        return Plugin(entry, load_spec(entry))

    def _try(self, entry: Entry) -> Plugin | None:
        try:
            return self._import(entry)
        except BadPlugin:
            return None

    def _find(self, kind: str, name: str) -> Entry:
        for entry in self.entries(kind):
            if entry.name == name:
                return entry
        names = sorted({entry.name for entry in self.entries(kind) if entry.problem is None})
        raise UnknownPlugin(f"there is no {kind} plugin named {name!r}", did_you_mean(name, names, what="Available"))


def look_elsewhere(kind: str) -> str:
    """A hint where nothing is known that would make a part of this kind usable."""
    return f"tpserve plugins list --kind {kind} shows what else there is"


def _fault(entry: Entry) -> str:
    return f"That is a fault of {entry.distribution} {entry.version}"
