"""``tpserve replay``: decide again what was recorded, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpserve.cli.common import command_app, file_path

__all__ = ["app"]

app = command_app()


@app.command()
def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What tpserve launch --record FILE has written.", parser=file_path)
    ],
    policy: Annotated[
        str | None, typer.Option(help="Let this policy decide, to see where it first decides otherwise.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("-o", "--option", metavar="policy.KEY=VALUE", help="Set an option of --policy; may be repeated."),
    ] = None,
) -> None:
    """Decide again what was recorded, without a model.

    The exit code is 0 if every decision is the same, and 1 at the first that differs.
    """
    from tpserve.launch.compose import load_part
    from tpserve.launch.recording import policy_part
    from tpserve.scheduler import replay as replaying
    from tpserve.scheduler.recording import Recording

    recording = Recording(file)
    part = policy_part(recording.header, policy, option or [])
    done = replaying.replay(recording, load_part(part)())
    summary = (
        f"{file}: {done.rounds} rounds, {done.requests} requests, {done.tokens} tokens of {recording.header.model}"
    )
    typer.echo(f"{summary} are decided alike by policy {part.name}")
    if recording.is_cut_off:
        typer.echo("the end of the recording is missing, as when a rank is killed", err=True)
    if done.difference:
        typer.echo(done.difference)
        raise typer.Exit(1)
