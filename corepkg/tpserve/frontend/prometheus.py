"""Counters, gauges and histograms, written in Prometheus's text format 0.0.4.

For one thread: nothing is locked, and an update is a handful of instructions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

__all__ = ["CONTENT_TYPE", "Counter", "Gauge", "Histogram", "Metric", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Metric(ABC):
    """What one name stands for.

    Args:
        name: as it is served.
        help: one line.
    """

    type: ClassVar[str]

    def __init__(self, name: str, help: str) -> None:
        self.name = name
        self.help = help

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """The samples, one a line."""


class Gauge(Metric):
    """A number that goes up and down.

    Attributes:
        value: the number now.
    """

    type = "gauge"

    def __init__(self, name: str, help: str, labels: Mapping[str, str] = {}) -> None:
        super().__init__(name, help)
        self.value: float = 0
        self._labels = _braces(labels)

    def lines(self) -> Iterator[str]:
        """The number."""
        yield f"{self.name}{self._labels} {self.value}"


class Counter(Metric):
    """Numbers that only grow, one for each value of a label, or a single one if there is none.

    Args:
        name: ends in ``_total``.
        help: one line.
        label: the label.
        values: all values that it may have; served from the start.
    """

    type = "counter"

    def __init__(self, name: str, help: str, label: str = "", values: Sequence[str] = ("",)) -> None:
        super().__init__(name, help)
        self._counts = dict.fromkeys(values, 0)
        self._labels = {value: _braces({label: value} if label else {}) for value in values}

    def add(self, amount: int, value: str = "") -> None:
        """Count so many more."""
        self._counts[value] += amount

    def lines(self) -> Iterator[str]:
        """A sample for each value of the label."""
        for value, count in self._counts.items():
            yield f"{self.name}{self._labels[value]} {count}"


class Histogram(Metric):
    """How many observations lie below each of several bounds.

    Args:
        name: with the unit.
        help: one line.
        bounds: ascending; one more bucket, for all above, is added.
    """

    type = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        super().__init__(name, help)
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Take one more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        """The cumulative buckets, the sum and the count."""
        counts = list(accumulate(self._counts))
        for bound, count in zip([*map(str, self._bounds), "+Inf"], counts, strict=True):
            yield f"{self.name}_bucket{_braces({'le': bound})} {count}"
        yield f"{self.name}_sum {self._sum}"
        yield f"{self.name}_count {counts[-1]}"


def render(metrics: Iterable[Metric]) -> bytes:
    """All metrics as the body of a response of :data:`CONTENT_TYPE`."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.type}", *metric.lines(), ""]
    return "\n".join(lines).encode()


def _braces(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{value.translate(ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""
