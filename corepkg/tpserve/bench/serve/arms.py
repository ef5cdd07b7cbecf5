"""The arms of a comparison: whole servers that are started for it, or one that runs already."""

from __future__ import annotations

import asyncio
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tpserve.bench.client import await_ready
from tpserve.bench.http import read_origin
from tpserve.bench.server import composition, serving
from tpserve.config import ServeConfig
from tpserve.errors import ConfigError, LaunchError
from tpserve.outputs import Named, inputs, outputs

__all__ = ["Arm", "launched", "running"]

OURS = ("--port", "--dry-run", "--json", "--help")
"""Flags of a launch that the bench gives itself, or that start no server."""


class Arm(msgspec.Struct, frozen=True):
    """One server.

    Attributes:
        name: what the report calls it; unique in a comparison.
        flags: of ``tpserve launch``.
        url: of a server that runs already; empty: it is started anew for each block.
        composition: what a server with these flags is made of.
    """

    name: str
    flags: list[str] = []
    url: str = ""
    composition: dict[str, Any] = {}

    def __str__(self) -> str:
        return self.url or shlex.join(["tpserve", "launch", *self.flags])

    def outputs(self) -> Iterator[Named]:
        """The files that it writes."""
        return iter(()) if self.url else outputs(self._config, f"{self.name}'s ")

    def inputs(self) -> Iterator[Named]:
        """What it reads."""
        if not self.url:
            yield f"{self.name}'s --config", _config_file(self.flags)
            yield from inputs(self._config, f"{self.name}'s ")

    @property
    def _config(self) -> ServeConfig:
        return msgspec.convert(self.composition["config"], ServeConfig)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its address, for as long as it is needed; one that runs already may be starting still.

        Raises:
            LaunchError: it does not start, or is not there.
        """
        if self.url:
            asyncio.run(await_ready(read_origin(self.url), _note))
            yield self.url
            return
        try:
            with serving(self.flags) as url:
                yield url
        except LaunchError as error:
            raise _named(self.name, error) from None


def launched(name: str, flags: str) -> Arm:
    """An arm that is started with these flags, written as in a shell.

    Raises:
        ConfigError: they cannot be read.
        LaunchError: no server can be made of them.
    """
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"--{name.lower()} {flags}: {error}") from None
    for word in words:
        if word.partition("=")[0] in OURS:
            raise ConfigError(f"{name}: the bench starts servers its own way, without {word}", f"Leave {word} out")
    try:
        return Arm(name, words, composition=composition(words))
    except LaunchError as error:
        raise _named(name, error) from None


def running(url: str) -> Arm:
    """An arm that runs already."""
    return Arm("server", url=url)


def _config_file(flags: list[str]) -> Path | None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    found: Path | None = parser.parse_known_args(flags)[0].config
    return found


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _named(name: str, error: LaunchError) -> LaunchError:
    return LaunchError(f"{name}: {error.message}", error.hint)
