"""What the sub-commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from tpserve.bench.blocks import signal_of
from tpserve.errors import ConfigError
from tpserve.messages import MaxTokens, Temperature
from tpserve.settings import flag_name
from tpserve.values import convert, to_json

__all__ = [
    "check_model",
    "command_app",
    "file_path",
    "interrupted",
    "print_json",
    "print_table",
    "sampling_fields",
    "write_output",
]


def command_app() -> typer.Typer:
    """Make the empty ``app`` of a sub-command's module, with the settings that all have in common."""
    return typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)


def check_model(model: str | None) -> None:
    """See that a model that is named has a name: an empty one comes of a variable that is not set.

    Raises:
        ConfigError: it has none.
    """
    if model == "":
        raise ConfigError("the model's name is empty", "Leave it out for the embedded model")


def file_path(text: str) -> Path:
    """The path that a flag gives: not an empty one, which would be the current folder.

    Raises:
        BadParameter: it is empty; typer adds the flag.
    """
    if not text:
        raise typer.BadParameter("the name is empty: is a variable in the command not set?")
    return Path(text)


def sampling_fields(**given: Any) -> dict[str, Any]:
    """The sampling fields among these that were given as flags, checked.

    Raises:
        ConfigError: one cannot have the value that it has.
    """
    types = {"temperature": Temperature, "max_tokens": MaxTokens}
    fields = {name: value for name, value in given.items() if value is not None}
    for name, value in fields.items():
        try:
            fields[name] = convert(value, types[name])
        except ValueError as error:
            raise ConfigError(f"{flag_name(name)}: {error}") from None
    return fields


def write_output(path: Path, content: bytes) -> None:
    """Write a file that :func:`tpserve.outputs.check_output` has seen.

    Raises:
        ConfigError: it cannot be written any more.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def interrupted(stop: KeyboardInterrupt) -> typer.Exit:
    """Say that there are no figures; the exit code is 128 and the number of the signal, the argument of ``stop``."""
    typer.echo("interrupted: there are no figures", err=True)
    return typer.Exit(128 + signal_of(stop))


def print_json(value: Any) -> None:
    """Print a value as indented JSON; paths and the like as text."""
    typer.echo(msgspec.json.format(to_json(value), indent=2).decode())


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equally many texts in columns two spaces apart; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
