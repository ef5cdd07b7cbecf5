"""When messages arrive, if not as the ranks are ready for them: random with a seed, or as a file says."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from tpserve.bench.transport.messages import SMALLEST
from tpserve.errors import ConfigError
from tpserve.values import read_json

__all__ = ["Arrival", "bursts", "read_trace"]

DAY = 86_400.0
HINT = 'Each line is {"at": SECONDS}, with "size": BYTES as wanted, in order of time'


class Arrival(msgspec.Struct, frozen=True):
    """One message.

    Attributes:
        at: seconds after the start; at most a day.
        size: its bytes; 0 in a file that does not say.
    """

    at: Annotated[float, Meta(ge=0, le=DAY)]
    size: Annotated[int, Meta(ge=0)] = 0


def bursts(count: int, at_once: int, size: int, rate: float, random: Random) -> list[Arrival]:
    """A Poisson process of bursts.

    Args:
        count: how many bursts.
        at_once: messages of each; 1 makes it the plain process.
        size: of each message, in bytes.
        rate: messages a second on average.
        random: where the gaps come from.
    """
    arrivals: list[Arrival] = []
    at = 0.0
    for _ in range(count):
        at += random.expovariate(rate / at_once)
        arrivals += [Arrival(at, size)] * at_once
    return arrivals


def read_trace(path: Path, size: int) -> list[Arrival]:
    """Read a trace: JSON Lines, one for each message.

    Args:
        path: the file.
        size: of messages that do not say.

    Raises:
        ConfigError: it cannot be read, or a line is wrong.
    """
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    arrivals: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        try:
            arrival = read_json(line, Arrival)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}", HINT) from None
        if 0 < arrival.size < SMALLEST:
            raise ConfigError(f"{path}, line {number}: a message has at least {SMALLEST} bytes")
        if arrivals and arrival.at < arrivals[-1].at:
            raise ConfigError(f"{path}, line {number}: earlier than the line before", HINT)
        arrivals.append(arrival if arrival.size else Arrival(arrival.at, size))
    if not arrivals:
        raise ConfigError(f"{path} has no messages", HINT)
    return arrivals
