"""What is measured on every arm: how many messages of what size a round has, and how rounds follow each other."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from tpserve.bench.transport.arrivals import Arrival, read_trace
from tpserve.bench.transport.messages import SMALLEST
from tpserve.errors import ConfigError

__all__ = ["Case", "Load", "make_cases", "read_numbers", "read_sizes"]

Pace = Literal["paced", "free", "poisson", "burst", "trace"]

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MOST_BYTES = {"paced": 1 << 30, "free": 256 << 20, "poisson": 256 << 20, "burst": 256 << 20, "trace": 256 << 20}
"""Bytes that all rounds of a case may have together: a round's frames are made as it comes, or all beforehand."""
FEWEST_ROUNDS = 20


class Load(msgspec.Struct, frozen=True):
    """How rounds follow each other.

    Attributes:
        pace: ``paced``: the next begins when every rank has finished; ``free``: the leader waits for nobody; or
            messages arrive by themselves: ``poisson`` (one at a time), ``burst`` (a round's messages at once) or
            ``trace``.
        rate: messages a second that arrive on average.
        gap: microseconds between paced rounds, for ranks to fall asleep in.
        step: microseconds that every rank computes between paced rounds.
        trace: the file of a trace.
    """

    pace: Pace = "paced"
    rate: float = 1000.0
    gap: float = 0.0
    step: float = 0.0
    trace: Path | None = None

    @property
    def is_timed(self) -> bool:
        """Messages arrive by themselves, so that a round may hold any number of them."""
        return self.pace in ("poisson", "burst", "trace")

    def compute(self) -> None:
        """Keep this rank's core busy for the time of a step."""
        until = time.monotonic_ns() + 1000 * self.step
        while time.monotonic_ns() < until:
            pass


class Case(msgspec.Struct, frozen=True):
    """One point of a sweep.

    Attributes:
        messages: of a round.
        size: bytes of a message as it is sent.
        rounds: so many in each block; with a load that is timed, so many times ``messages`` arrive.
        title: what reports call it, if the numbers do not say it.
        digest: xxh3-64 of the trace's file, in hex; empty if there is none.
    """

    messages: int
    size: int
    rounds: int
    title: str = ""
    digest: str = ""

    def __str__(self) -> str:
        if self.title:
            return self.title
        if not self.messages:
            return "empty rounds"
        return f"{self.messages} × {size_text(self.size)}"


def make_cases(load: Load, messages: Sequence[int], sizes: Sequence[int], rounds: int) -> list[Case]:
    """Every combination of a sweep; large ones get fewer rounds, and empty rounds have no size.

    Raises:
        ConfigError: the load and the numbers do not go together.
    """
    if load.pace == "trace":
        return [_trace_case(load, sizes)]
    if load.is_timed and not all(messages):
        raise ConfigError("--messages 0 goes with paced and free-running rounds: nothing arrives in an empty round")
    limit = MOST_BYTES[load.pace]
    found = {
        Case(count, size if count else 0, max(min(rounds, FEWEST_ROUNDS), min(rounds, limit // max(1, count * size))))
        for count, size in itertools.product(messages, sizes)
    }
    return sorted(found, key=lambda case: (case.messages, case.size))


def read_sizes(text: str) -> list[int]:
    """Read ``64,300,4K,16M`` as bytes.

    Raises:
        ConfigError: it is no such list, or one is too small for a message.
    """
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", word.strip().lower())
        if not match:
            raise ConfigError(f"--size: expected bytes such as 300, 64K or 16M, found {word!r}")
        size = int(match[1]) * UNITS[match[2]]
        if not SMALLEST <= size <= 1 << 30:
            raise ConfigError(f"--size: a message has {SMALLEST} bytes to 1G, found {word!r}")
        sizes.append(size)
    return sizes


def read_numbers(text: str, flag: str) -> list[int]:
    """Read ``0,1,32``.

    Raises:
        ConfigError: it is no such list.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"{flag}: expected numbers such as 0,1,32, found {text!r}")
    return [int(word) for word in words]


def size_text(size: int) -> str:
    """A number of bytes for people: ``300 B``, ``64 KiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def _trace_case(load: Load, sizes: Sequence[int]) -> Case:
    if load.trace is None:
        raise ConfigError("--arrival trace needs --trace FILE")
    if len(sizes) != 1:
        raise ConfigError("--arrival trace takes one --size, for messages that have none in the file")
    arrivals: list[Arrival] = read_trace(load.trace, sizes[0])
    if sum(arrival.size for arrival in arrivals) > MOST_BYTES["trace"]:
        raise ConfigError(f"{load.trace} has more than {size_text(MOST_BYTES['trace'])} of messages")
    smallest, largest = (pick(arrival.size for arrival in arrivals) for pick in (min, max))
    span = size_text(smallest) + (f" to {size_text(largest)}" if largest > smallest else "")
    digest = xxhash.xxh3_64_hexdigest(load.trace.read_bytes())
    return Case(1, sizes[0], len(arrivals), f"a trace of {span}", digest)
