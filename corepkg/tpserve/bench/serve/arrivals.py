"""When requests arrive: a random process that is a function of its seed."""

from __future__ import annotations

import itertools
from random import Random

from tpserve.errors import ConfigError

__all__ = ["Rate", "arrival_times", "read_rates", "say_rate"]


Rate = float | None
"""Requests a second on average; None: all at once."""


def arrival_times(count: int, rate: Rate, burstiness: float, random: Random) -> list[float]:
    """When each request arrives, in seconds after the start; the first at 0.

    Args:
        count: how many.
        rate: requests a second on average.
        burstiness: shape of the gamma distribution of gaps: 1 makes a Poisson process, less comes in bursts, more is
            steadier.
        random: where the gaps come from.
    """
    if rate is None:
        return [0.0] * count
    gaps = [random.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count - 1)]
    return list(itertools.accumulate(gaps, initial=0.0))


def read_rates(text: str) -> list[Rate]:
    """Read ``inf`` or ``0.5,1,2,inf``.

    Raises:
        ConfigError: it is no such list.
    """
    rates: list[Rate] = []
    for word in text.split(","):
        try:
            rate = float(word)
        except ValueError:
            rate = 0.0
        if not rate > 0:
            raise ConfigError(f"--request-rate: expected requests a second such as 2, 0.5,1,2 or inf, found {word!r}")
        rates.append(None if rate == float("inf") else rate)
    return list(dict.fromkeys(rates))


def say_rate(rate: Rate) -> str:
    """A rate in words."""
    return "all at once" if rate is None else f"{rate:g} requests/s"
