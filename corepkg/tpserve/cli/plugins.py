"""``tpserve plugins``: what can be chosen, whether it works here, and what can be set about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tpserve.api.specs import KINDS
from tpserve.cli.common import command_app, file_path, print_json, print_table
from tpserve.config import LONGEST
from tpserve.errors import ConfigError, UnknownPlugin
from tpserve.plugins.availability import PROBE_SECONDS
from tpserve.plugins.loading import stated_api
from tpserve.plugins.options import describe_options
from tpserve.plugins.registry import Entry, Plugin, Registry, Status
from tpserve.settings import kind_flag
from tpserve.values import closest, did_you_mean

app = command_app()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(no_args_is_help=True)
def plugins() -> None:
    """List and describe the parts that can be chosen."""


@app.command("list")
def list_plugins(
    as_json: AsJson = False,
    kind: Annotated[str, typer.Option("--kind", metavar="KIND", help="List one kind only.")] = "",
) -> None:
    """List every plugin with its status on this machine."""
    if kind and kind not in KINDS:
        raise ConfigError(f"--kind: there is no kind {kind!r}", did_you_mean(kind, KINDS, what="Kinds"))
    registry = Registry.discover()
    rows = plugin_rows(registry, registry.entries(kind or None))
    if as_json:
        print_json(rows)
    else:
        columns = ("kind", "name", "distribution", "version", "api", "status", "reason")
        print_table([columns, *([str(row[column] or "-") for column in columns] for row in rows)])


@app.command("show")
def show_plugin(
    plugin: Annotated[str, typer.Argument(metavar="KIND.NAME", help="The plugin, as in transport.zmq.")],
    as_json: AsJson = False,
) -> None:
    """Describe one plugin.

    What it can do, what it needs, and its options with how to set them.
    """
    registry = Registry.discover()
    found = registry.describe(_find(registry, plugin))
    status = registry.status(found.entry)
    if as_json:
        print_json(_description(found, status))
    else:
        typer.echo("\n".join(_description_lines(found, status)))


@app.command("new")
def new_plugin(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="transport, sync, policy, attention, ops or comm.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="What people choose it by, as in zmq.")],
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where to; tpserve-KIND-NAME if left out.", parser=file_path),
    ] = None,
) -> None:
    """Write a package with a new plugin.

    It installs with pip, holds a small implementation that works and is meant to be changed, and tests it against the
    contract of its kind.
    """
    from tpserve.plugins.new import distribution_name, taken_by, usage, write_package

    folder = folder or Path(distribution_name(kind, name))
    files = write_package(kind, name, folder)
    typer.echo("\n".join(str(file) for file in files))
    owner = taken_by(Registry.discover().entries(), kind, name)
    if owner:
        article = "an" if kind[0] in "aeiou" else "a"
        typer.echo(
            f"note: {owner} has {article} {kind} plugin named {name} too; "
            "where both are installed, neither can be used",
            err=True,
        )
    typer.echo(
        f"\nNext:\n  pip install -e '{folder}[dev]'\n  tpserve plugins check {kind}.{name}\n"
        f"  tpserve launch {usage(kind, name)}"
    )


@app.command("check")
def check_plugin(
    plugin: Annotated[str, typer.Argument(metavar="KIND.NAME", help="The plugin, as in transport.zmq.")],
    fast: Annotated[bool, typer.Option("--fast", help="Leave out the tests that take long.")] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda, for the kinds that compute.")] = "auto",
    limit: Annotated[
        float | None,
        typer.Option(
            "--limit",
            metavar="SECONDS",
            min=1,
            max=LONGEST,
            help="Fail a test that takes longer; 300 if left out, 60 with --fast.",
        ),
    ] = None,
    maxfail: Annotated[
        int, typer.Option("--maxfail", metavar="N", min=0, help="Stop after so many failures; 0 goes on.")
    ] = 3,
) -> None:
    """Test whether a plugin keeps its kind's contract.

    Runs the contract tests of tpserve.testing on the plugin as it is installed, with its default options, and tests of
    its package. Needs pytest. The last line says what was skipped and why. The exit code is 0 if all pass, 1 if not,
    and 2 if it cannot be tested here.
    """
    from tpserve.plugins.check import check_contract, choose_device

    registry = Registry.discover()
    entry = _find(registry, plugin)
    found = registry.load(entry.kind, entry.name)
    limit = limit or (60.0 if fast else 300.0)
    checked = check_contract(found, device=choose_device(found, device), fast=fast, limit=limit, failures=maxfail)
    if not checked.passed:
        more = f"; testing stops after {maxfail} failures unless --maxfail says otherwise" if maxfail else ""
        typer.echo(f"{entry.key} breaks the contract of the {entry.kind} kind{more}", err=True)
        raise typer.Exit(1)
    limits = ", as far as --fast tests" if fast else ""
    if checked.skipped:
        limits += f"; {sum(checked.skipped.values())} skipped: {', '.join(checked.skipped)}"
    typer.echo(f"{entry.key} keeps the contract of the {entry.kind} kind{limits}")


def plugin_rows(registry: Registry, entries: list[Entry]) -> list[dict[str, Any]]:
    """What ``plugins list`` says of each entry point; probes of all run side by side."""
    return [
        {
            "kind": entry.kind,
            "name": entry.name,
            "distribution": entry.distribution,
            "version": entry.version,
            "api": registry.stated_api(entry),
            "status": status.state,
            "reason": status.reason,
            "hint": status.hint,
        }
        for entry, status in zip(entries, registry.statuses(entries, _say_waiting), strict=True)
    ]


def _say_waiting(names: list[str]) -> None:
    typer.echo(f"waiting for the probe of {', '.join(names)}, {PROBE_SECONDS:g} s at most", err=True)


def _find(registry: Registry, key: str) -> Entry:
    entries = {entry.key: entry for entry in registry.entries()}
    if key not in entries:
        raise UnknownPlugin(f"there is no plugin {key!r}", _nearest(key, list(entries)))
    return entries[key]


def _nearest(key: str, known: list[str]) -> str:
    """A hint for a plugin that there is not: one of nearly that name, of its kind if it has one, or what there is."""
    kind, dot, name = key.rpartition(".")
    near = closest(kind, KINDS) if dot else ""
    if near is None:
        return f"Plugins are KIND.NAME, and kinds {', '.join(KINDS)}"
    candidates = [each for each in known if each.startswith(f"{near}.")] if dot else known
    names = {each.partition(".")[2]: each for each in reversed(candidates)}
    found = closest(name, names)
    if found is not None:
        return f"Did you mean {names[found]!r}?"
    return f"Plugins {f'of kind {near}' if dot else 'are KIND.NAME'}: {', '.join(candidates)}"


def _description(plugin: Plugin, status: Status) -> dict[str, Any]:
    spec = plugin.spec
    return {
        "kind": plugin.kind,
        "name": plugin.name,
        "summary": spec.summary,
        "distribution": plugin.entry.distribution,
        "version": plugin.entry.version,
        "api": stated_api(plugin.entry),
        "status": msgspec.to_builtins(status),
        "factory": spec.factory,
        "requires": list(spec.requires),
        "capabilities": _capabilities(plugin),
        "options": msgspec.to_builtins(describe_options(spec.options)),
    }


def _capabilities(plugin: Plugin) -> dict[str, Any]:
    """The capabilities struct, which every kind's spec has a type of its own for, as a dictionary."""
    capabilities: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(plugin.spec)["capabilities"])
    return capabilities


def _description_lines(plugin: Plugin, status: Status) -> list[str]:
    entry, spec = plugin.entry, plugin.spec
    flag = kind_flag(plugin.kind)
    lines = [
        f"{entry.key}: {spec.summary}",
        "",
        f"choose it     {flag} {plugin.name}",
        f"distribution  {entry.distribution} {entry.version} (plugin API {stated_api(entry)})",
        f"requires      {', '.join(spec.requires) or 'nothing'}",
        f"status        {status.state}" + (f": {status.reason}" if status.reason else ""),
        *([f"hint          {status.hint}"] if status.hint else []),
    ]
    capabilities, options = _capabilities(plugin), describe_options(spec.options)
    width = 2 + max([12, *map(len, capabilities), *(len(option.name) for option in options)])
    if capabilities:
        lines += ["", "capabilities"]
        lines += [f"  {name:<{width}}{_plain(value)}" for name, value in capabilities.items()]
    if options:
        example = f"{plugin.kind}.{options[0].name}={_plain(options[0].default)}"
        lines += ["", f"options       set with -o {example}, in the environment or in a file"]
    for option in options:
        lines.append(f"  {option.name:<{width}}{option.doc or '(not described)'}")
        lines.append(f"  {'':<{width}}{option.type}; default {_plain(option.default)}")
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "any"
    return str(value)
