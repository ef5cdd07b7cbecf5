"""The arms of a comparison: each a transport and a synchronisation with their options, or the ancestor's round.

An arm is written as ``zmq``, ``transport=zmq,sync=inband`` or ``transport=zmq,transport.batch=65536,name=small``; a
matrix as axes, ``transport=zmq,nng`` and ``sync=gloo,inband``, whose every combination is an arm.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from tpserve.api import NoOptions
from tpserve.errors import ConfigError, PluginError, UnavailablePlugin, UnsupportedByPlugin
from tpserve.launch.checks import check_fanout
from tpserve.launch.compose import SYNCS, TRANSPORTS, Part
from tpserve.plugins.availability import check_requirements
from tpserve.plugins.registry import Plugin, Registry, look_elsewhere
from tpserve.settings import OptionTable, plugin_options
from tpserve.values import did_you_mean

__all__ = ["ANCESTOR", "Arm", "matrix", "read_arms"]

ANCESTOR = "ancestor"
ANCESTOR_NEEDS = ("pyzmq>=26",)
KEYS = ("transport", "sync", "name")


class Arm(msgspec.Struct, frozen=True):
    """One choice of parts.

    Attributes:
        name: what the report calls it; unique in a comparison.
        transport: carries the frames; None for the ancestor's round.
        sync: announces the rounds; None for the ancestor's round.
    """

    name: str
    transport: Part | None = None
    sync: Part | None = None


def matrix(axes: Sequence[str]) -> list[str]:
    """The arms of a matrix, as they would be written one by one.

    Raises:
        ConfigError: an axis has no values.
    """
    choices = []
    for axis in axes:
        key, _, values = axis.partition("=")
        if not values:
            raise ConfigError(f"{axis!r} is no axis of a matrix", "Write KEY=VALUE,VALUE as in sync=gloo,inband")
        choices.append([f"{key}={value}" for value in values.split(",")])
    return [",".join(combination) for combination in itertools.product(*choices)] if choices else []


def read_arms(texts: Sequence[str], options: OptionTable, registry: Registry, *, is_pair: bool = False) -> list[Arm]:
    """Read and check the arms of a comparison.

    Args:
        texts: how each is written.
        options: what is set for all, as in ``ServeConfig.options``.
        registry: the plugins there are.
        is_pair: the first two may be the same, to see what is chance; the second is called ``zmq+shm (2)`` then.

    Raises:
        ConfigError: an arm is written wrongly, or two have the same name.
        PluginError: a part does not exist or cannot be used.
    """
    arms = [_read_arm(text, options, registry) for text in texts]
    if is_pair and arms[0].name == arms[1].name and "name" not in _words(texts[1]):
        arms[1] = msgspec.structs.replace(arms[1], name=f"{arms[1].name} (2)")
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two arms are called {name}", "Give one of them another name with name=…")
    return arms


def _read_arm(text: str, options: OptionTable, registry: Registry) -> Arm:
    words = _words(text)
    if words.get("transport") == ANCESTOR:
        if words.keys() - {"transport", "name"}:
            raise ConfigError(f"arm {text!r}: the ancestor's round has no parts or options", "Only name= can be set")
        status = check_requirements(ANCESTOR_NEEDS)
        if status.state != "available":
            raise UnavailablePlugin(f"the ancestor's round is unavailable: {status.reason}", status.hint)
        return Arm(words.get("name", ANCESTOR))
    own: OptionTable = {}
    for key, value in words.items():
        kind, dot, field = key.partition(".")
        if dot:
            own.setdefault(kind, {})[field] = value
    transport = _choose(registry, "transport", words.get("transport"), TRANSPORTS, options, own)
    sync = _choose(registry, "sync", words.get("sync"), SYNCS, options, own)
    settings = ",".join(f"{key}={value}" for key, value in words.items() if "." in key)
    name = words.get("name") or f"{transport.name}+{sync.name}" + (f" {settings}" if settings else "")
    return Arm(name, transport, sync)


def _words(text: str) -> dict[str, str]:
    words: dict[str, str] = {}
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            key, value = "transport", key
        kind, _, field = key.partition(".")
        known = field and kind in ("transport", "sync") if "." in key else key in KEYS
        if not known:
            hint = did_you_mean(key, [*KEYS, "transport.OPTION", "sync.OPTION"], what="An arm sets")
            raise ConfigError(f"arm {text!r}: {key!r} is nothing that an arm has", hint)
        if not value or key in words:
            raise ConfigError(f"arm {text!r}: expected {key} once, with a value")
        words[key] = value
    return words


def _choose(
    registry: Registry, kind: str, wanted: str | None, candidates: Sequence[str], options: OptionTable, own: OptionTable
) -> Part:
    """Take the part that is wanted, or else the first candidate that works here."""
    if wanted is not None:
        return _take(registry, kind, wanted, "asked for", options, own)
    passed = []
    for name in candidates:
        try:
            return _take(registry, kind, name, "auto", options, own)
        except PluginError as error:
            passed.append(error.message)
    raise UnavailablePlugin(f"no {kind} can be used: {'; '.join(passed)}", look_elsewhere(kind))


def _take(registry: Registry, kind: str, name: str, reason: str, options: OptionTable, own: OptionTable) -> Part:
    plugin = registry.load(kind, name)
    problem = check_fanout(True, plugin.spec) if kind == "transport" else None
    if problem:
        raise UnsupportedByPlugin(f"{kind}.{name} {problem}", look_elsewhere(kind))
    values = plugin_options(options, kind, name) | own.get(kind, {})
    return Part(kind, name, reason, f"{plugin.entry.distribution} {plugin.entry.version}", _all(plugin, values))


def _all(plugin: Plugin, values: dict[str, Any]) -> dict[str, Any]:
    """All options of a plugin with their values, defaults included: a report must say them."""
    made = plugin.make_options(values)
    return {} if isinstance(made, NoOptions) else msgspec.to_builtins(made)
