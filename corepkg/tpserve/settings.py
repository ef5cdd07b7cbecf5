"""Where settings come from: command line over environment over file over the defaults of ServeConfig.

One setting ``page_size`` is ``--page-size`` on the command line, ``TPSERVE_PAGE_SIZE`` in the environment and
``page_size`` (or ``page-size``) in a YAML file. A plugin's option ``send_buffer`` is

    -o transport.send_buffer=8192             TPSERVE_OPTIONS__TRANSPORT__SEND_BUFFER=8192
    -o transport.nng.send_buffer=8192         TPSERVE_OPTIONS__TRANSPORT__NNG__SEND_BUFFER=8192

and in a file either those dotted keys or nested ones, under ``options``. The first form reaches whichever
transport is chosen, the second only the one that it names; the second wins within one source, and a later source over
an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tpserve.api.specs import KINDS
from tpserve.config import ServeConfig
from tpserve.errors import ConfigError, UserError
from tpserve.values import closest, convert, did_you_mean, is_text, read_yaml

__all__ = ["flag_name", "kind_flag", "load_settings", "plugin_options", "unknown_variables"]

PREFIX: Final = "TPSERVE_"
OPTIONS_PREFIX: Final = "TPSERVE_OPTIONS__"
OTHER_VARIABLES: Final = ("TPSERVE_CACHE",)
"""Variables that other parts of tpserve read; a setting of the same name has none."""

PATHS: Final = ("model", "record", "profile")
"""Settings that name files or folders."""

LEAST_CONTEXT: Final = 8
"""Tokens; the warm-up needs nearly as many."""

_TYPES: Final = {field.name: field.type for field in msgspec.structs.fields(ServeConfig) if field.name != "options"}

OptionTable = dict[str, dict[str, Any]]


class _Given(msgspec.Struct, frozen=True):
    """What was written for an option, and where."""

    value: Any
    source: str


_GivenTable = dict[str, dict[str, _Given]]


class _Layer(msgspec.Struct, frozen=True):
    """What one source sets: checked settings, and plugin options still as they were written."""

    settings: dict[str, Any]
    options: _GivenTable = {}


def load_settings(
    cli: Mapping[str, Any],
    option_flags: list[str],
    file: Path | None,
    environ: Mapping[str, str],
    *,
    label: Callable[[str], str] | None = None,
) -> ServeConfig:
    """Gather the settings of one server or engine.

    Args:
        cli: settings given on the command line by field name; None stands for one that was not given.
        option_flags: what ``-o`` was given: ``kind.field=value`` or ``kind.name.field=value``.
        file: a YAML file, or None.
        environ: the environment.
        label: names a field of ``cli`` in errors; as a command line flag unless given.

    Raises:
        ConfigError: a value, a key or the file is wrong; the message says which source and key.
    """
    layers = [
        *([_from_file(file)] if file is not None else []),
        _from_environment(environ),
        _from_command_line(cli, option_flags, label or flag_name),
    ]
    settings: dict[str, Any] = {}
    options: _GivenTable = {}
    for layer in layers:
        settings |= layer.settings
        options = _merge_options(options, layer.options)
    config = ServeConfig(**settings, options=_checked_options(options))
    if not config.heartbeat < config.watchdog:
        raise ConfigError(
            f"heartbeat is {config.heartbeat:g} s and watchdog {config.watchdog:g} s",
            "An idle leader must show life before followers give up: choose a heartbeat below the watchdog",
        )
    if 0 < config.max_context < LEAST_CONTEXT:
        raise ConfigError(f"max_context is {config.max_context}", f"Choose {LEAST_CONTEXT} or more, or 0")
    return config


def flag_name(field: str) -> str:
    """The command line flag of a setting."""
    return "MODEL" if field == "model" else "--" + field.replace("_", "-")


def kind_flag(kind: str) -> str:
    """The command line flag that chooses the plugin of a kind."""
    return flag_name("attn" if kind == "attention" else kind)


def plugin_options(options: OptionTable, kind: str, name: str, *, general: bool = True) -> dict[str, Any]:
    """The options that were set for one plugin.

    Args:
        options: ``ServeConfig.options``.
        kind: the plugin's kind.
        name: its name.
        general: whether what was set for the kind as a whole counts; not for a second plugin of the same kind.
    """
    return {**(options.get(kind, {}) if general else {}), **options.get(f"{kind}.{name}", {})}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each TPSERVE_ variable that sets nothing; to be shown as warnings, for it may not be ours."""
    known = [*OTHER_VARIABLES, *(PREFIX + field.upper() for field in _TYPES)]
    names = [name.removeprefix(PREFIX) for name in known]
    sentences = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and _option_of_variable(name) is None:
            near = closest(name.removeprefix(PREFIX), names)
            sentences.append(f"{name} sets nothing" + (f"; did you mean {PREFIX}{near}?" if near else ""))
    return sentences


def _from_command_line(cli: Mapping[str, Any], option_flags: list[str], label: Callable[[str], str]) -> _Layer:
    given = {key: value for key, value in cli.items() if value is not None and key != "options"}
    options: _GivenTable = {}
    for text in option_flags:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"-o {text}: no value", "Write -o kind.field=value, as in -o transport.send_buffer=8192")
        _put_option(options, key.strip(), value, f"-o {text}")
    table = cli.get("options") or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{label('options')}: expected a mapping, found {table!r}")
    for key, value in table.items():
        _put_option(options, str(key), value, f"{label('options')}: {key}")
    return _Layer(_check(given, label), options)


def _from_environment(environ: Mapping[str, str]) -> _Layer:
    variables = {field: PREFIX + field.upper() for field in _TYPES}
    settings = {
        field: environ[variable]
        for field, variable in variables.items()
        if variable in environ and variable not in OTHER_VARIABLES
    }
    options: _GivenTable = {}
    for name in sorted(environ):
        key = _option_of_variable(name)
        if key is not None:
            _put_option(options, key, environ[name], name)
    return _Layer(_check(settings, variables.__getitem__), options)


def _from_file(file: Path) -> _Layer:
    content = _read_yaml(file)
    written: dict[str, Any] = {}
    for key, value in content.items():
        field = str(key).replace("-", "_")
        if field in written:
            raise ConfigError(f"{file}: {field} is there twice, with - and with _")
        written[field] = value
    options: _GivenTable = {}
    table = written.pop("options", None) or {}
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: options: expected a mapping, found {table!r}")
    for key, value in table.items():
        _put_option(options, str(key), value, f"{file}: options.{key}")
    return _Layer(_check(written, lambda field: f"{file}: {field}"), options)


def _read_yaml(file: Path) -> dict[Any, Any]:
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a mapping of settings, found {type(content).__name__}")
    return content


def _check(values: Mapping[str, Any], label: Callable[[str], str]) -> dict[str, Any]:
    checked = {}
    for field, value in values.items():
        if field not in _TYPES:
            raise ConfigError(f"{label(field)}: there is no such setting", did_you_mean(field, _TYPES))
        if not is_text(str(value)):
            hint = "Rename the file or folder" if field in PATHS else ""
            raise ConfigError(f"{label(field)}: {str(value)!r} is not text in UTF-8", hint)
        if "\0" in str(value):
            raise ConfigError(f"{label(field)}: {str(value)!r} has a NUL, which no name can have", "Take it out")
        try:
            checked[field] = convert(value, _TYPES[field])
        except ValueError as error:
            raise ConfigError(f"{label(field)}: {error}") from None
    return checked


def _put_option(options: _GivenTable, key: str, value: Any, source: str) -> None:
    """Add ``kind.field``, ``kind.name.field``, or a mapping of fields at ``kind`` or ``kind.name``."""
    parts = key.split(".")
    if parts[0] not in KINDS:
        raise ConfigError(f"{source}: there is no kind {parts[0]!r}", did_you_mean(parts[0], KINDS, what="Kinds"))
    if isinstance(value, dict) and len(parts) <= 2:
        for field, inner in value.items():
            _put_option(options, f"{key}.{field}", inner, source)
    elif len(parts) in (2, 3) and all(parts):
        options.setdefault(".".join(parts[:-1]), {})[parts[-1]] = _Given(value, source)
    else:
        raise ConfigError(f"{source}: {key!r} names no option", "Write kind.field or kind.name.field")


def _checked_options(options: _GivenTable) -> OptionTable:
    """The values, each checked: options of plugins that are not used too, for they are misspelt as easily."""
    if options:
        from tpserve.plugins.registry import Registry

        registry = Registry.discover()
    for scope, fields in options.items():
        kind, _, name = scope.partition(".")
        for field, given in fields.items():
            try:
                registry.check_option(kind, name or None, field, given.value)
            except UserError as error:
                raise ConfigError(f"{given.source}: {error.message}", error.hint) from None
    return {scope: {field: given.value for field, given in fields.items()} for scope, fields in options.items()}


def _option_of_variable(name: str) -> str | None:
    """``kind.field`` or ``kind.name.field`` of an environment variable that sets a plugin's option, else None."""
    parts = name.removeprefix(OPTIONS_PREFIX).lower().split("__")
    is_option = name.startswith(OPTIONS_PREFIX) and parts[0] in KINDS and len(parts) in (2, 3) and all(parts)
    return ".".join(parts) if is_option else None


def _merge_options(under: _GivenTable, over: _GivenTable) -> _GivenTable:
    """Lay one source's options over another's; a field set for a kind displaces older ones of single plugins."""
    merged = {scope: dict(fields) for scope, fields in under.items()}
    for scope, fields in over.items():
        for other in _scopes_within(merged, scope):
            merged[other] = {field: value for field, value in merged[other].items() if field not in fields}
        merged.setdefault(scope, {}).update(fields)
    return {scope: fields for scope, fields in merged.items() if fields}


def _scopes_within(options: _GivenTable, kind: str) -> Iterator[str]:
    return (scope for scope in list(options) if scope.startswith(kind + "."))
