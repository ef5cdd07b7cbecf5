"""The ``tpserve`` command: a table of sub-commands, each imported when it is run.

A sub-command ``name`` is the module ``tpserve.cli.name`` with a :class:`typer.Typer` called ``app``. An app with one
command is that command; one with several, or with a callback, is a group. Summaries are in COMMANDS, so that
``tpserve --help`` imports none of them. Apps are made by
:func:`tpserve.cli.common.command_app`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tpserve.errors import TpserveError, UserError
from tpserve.stdio import secure_streams
from tpserve.version import __version__

__all__ = ["COMMANDS", "app", "main"]

COMMANDS: dict[str, str] = {
    "launch": "Start a server.",
    "chat": "Talk to a running server in the terminal.",
    "generate": "Complete the prompts of a file, without a server.",
    "replay": "Decide again what a server has recorded, without a model.",
    "model": "Get the embedded model, or say where a model lies.",
    "bench": "Measure one choice against another on this machine.",
    "plugins": "List and describe the parts that can be chosen.",
    "env": "Describe this machine and installation, for a bug report.",
}
"""The sub-commands with their one-line summaries, in the order of the help."""


class LazyGroup(TyperGroup):
    """Holds a stand-in for each command of the table, enough for the help, until the command is run."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, summary in COMMANDS.items():
            self.add_command(TyperCommand(name=name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that the arguments name, then go on as usual."""
        if args and args[0] in COMMANDS:
            module = importlib.import_module(f"tpserve.cli.{args[0]}")
            self.add_command(typer.main.get_command(module.app), args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tpserve {__version__}")
        raise typer.Exit


@app.callback()
def tpserve(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve large language models from peer scheduler processes whose parts are plugins."""


def main() -> None:
    """Run the command line. What the user can mend ends with one or two lines and exit code 2.

    Other errors that are raised on purpose say all there is to say: exit code 1.
    """
    secure_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # what cannot be written is still an error here
    except UserError as error:
        typer.echo(f"error: {error.message}", err=True)
        if error.hint:
            typer.echo(f"hint: {error.hint}", err=True)
        raise SystemExit(2) from None
    except TpserveError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
