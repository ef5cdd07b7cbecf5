"""What programs that measure take on their command lines; what is wrong with it is one line and exit code 2."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from tpserve.api.cuda import cuda_devices
from tpserve.errors import UserError

__all__ = ["MANY", "check_gpus", "refusing", "run", "setting", "whole"]


MANY = 100_000
"""Of what takes time: no sensible number is larger."""


def whole(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number of a range, as a ``type`` of ``argparse``."""

    def read(text: str) -> int:
        digits = text.lstrip("0") or text[:1]
        if not text.isdecimal() or len(digits) > len(str(most)) or not least <= int(digits) <= most:
            raise ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} to {most}")
        return int(digits)

    return read


def setting(text: str) -> str:
    """Sees that a word is SETTING=VALUE, as a ``type`` of ``argparse``."""
    name, equals, _ = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError(f"{text!r} is not SETTING=VALUE")
    return text


def check_gpus(parser: ArgumentParser, needed: int) -> None:
    """End the program if there are fewer GPUs than it needs."""
    try:
        found = len(cuda_devices())
    except OSError:
        found = 0
    if found < needed:
        parser.error(f"so many GPUs are needed: {needed}; there are {found}")


@contextmanager
def refusing(parser: ArgumentParser) -> Iterator[None]:
    """End the program at what its user can mend."""
    try:
        yield
    except UserError as error:
        parser.error(str(error))


def run(main: Callable[..., None]) -> None:
    """Run a function as a program of ``typer``; what its user can mend is a line and exit code 2."""
    try:
        typer.run(main)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
