"""What the sub-commands share."""

from __future__ import annotations

import typer

__all__ = ["command_app"]


def command_app() -> typer.Typer:
    """Make the empty ``app`` of a sub-command's module, with the settings that all have in common."""
    return typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)
