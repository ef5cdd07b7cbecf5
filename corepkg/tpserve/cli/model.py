"""``tpserve model``: get the embedded model, or say where a model lies."""

from __future__ import annotations

from typing import Annotated

import typer

from tpserve.cli.common import command_app

app = command_app()


@app.callback(no_args_is_help=True)
def model() -> None:
    """Get the embedded model, or say where a model lies."""


@app.command("get")
def get_model() -> None:
    """Install the embedded default model.

    Prints its file; does nothing else if it is there.
    """
    from tpserve.weights.default_model import install

    typer.echo(install(_notify))


@app.command("path")
def model_path(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder, a .gguf file or a hub id; the embedded model if left out."),
    ] = "",
) -> None:
    """Print the folder that would be served.

    Converts or downloads the model if need be.
    """
    from tpserve.weights.source import resolve_model

    typer.echo(resolve_model(model, notify=_notify).path)


def _notify(text: str) -> None:
    typer.echo(text, err=True)
