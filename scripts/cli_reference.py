"""Write the reference part of docs/cli.md from the commands themselves: ``make docs``.

What people wrote stands above the marker line and is left alone.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tpserve.cli.main import COMMANDS

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
MARKER = "<!-- What follows is written by `make docs`. -->\n"


def page(current: str) -> str:
    """The page as it should be."""
    written, _, _ = current.partition(MARKER)
    sections = [section for name in COMMANDS for section in command_sections(f"tpserve {name}", load(name))]
    return written + MARKER + "".join(f"\n{section}\n" for section in sections)


def load(name: str) -> Any:
    """The command behind a name of the table, as typer builds it."""
    return typer.main.get_command(importlib.import_module(f"tpserve.cli.{name}").app)


def command_sections(title: str, command: Any) -> Iterator[str]:
    """A section for a command, or one for each command of a group."""
    commands = getattr(command, "commands", None)
    if commands:
        for name, inner in commands.items():
            yield from command_sections(f"{title} {name}", inner)
    else:
        yield command_section(title, command)


def command_section(title: str, command: Any) -> str:
    """Usage, what it does, and a table of its arguments and options."""
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join([title, *(argument_name(argument) for argument in arguments), *(["[OPTIONS]"] if options else [])])
    rows = [(argument_name(argument), argument.help) for argument in arguments]
    rows += [(", ".join([*option.opts, *option.secondary_opts]), option.help) for option in options]
    lines = [f"## {title}", "", f"    {usage}", "", " ".join(command.help.split())]
    if rows:
        lines += ["", "| | |", "|---|---|", *(f"| `{name}` | {cell(text)} |" for name, text in rows)]
    return "\n".join(lines)


def argument_name(argument: Any) -> str:
    """An argument as the usage line shows it."""
    name = str(argument.metavar or argument.name.upper())
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else "")


def cell(text: str | None) -> str:
    """A text as it may stand in a table, without the marks that colour it in a terminal."""
    return " ".join(re.sub(r"\[/?dim\]", "", text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
