"""What a trace of ``--profile`` says of the GPU: how much of the time it was idle, and which kernels took the rest.

python -m tpserve.bench.trace DIR/rank0.json
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tpserve.values import read_json

__all__ = ["Gpu", "read_trace"]

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN = 24


class Gpu(msgspec.Struct, frozen=True):
    """The GPU's time, from the first kernel's beginning to the last one's end.

    Attributes:
        seconds: between the two.
        idle: the share of it in which nothing ran.
        gaps: seconds in which nothing ran, the longest first.
        kernels: seconds and number of runs by name, the largest share first.
    """

    seconds: float
    idle: float
    gaps: list[float]
    kernels: dict[str, tuple[float, int]]


class _Trace(msgspec.Struct, frozen=True):
    events: list[dict[str, Any]] = msgspec.field(name="traceEvents")


class _Run(msgspec.Struct, frozen=True, order=True):
    """What ran on the GPU; µs."""

    ts: float
    dur: Annotated[float, msgspec.Meta(ge=0)]
    name: str

    @property
    def end(self) -> float:
        return self.ts + self.dur


def read_trace(path: Path) -> Gpu:
    """Read a trace in Chrome's format.

    Raises:
        ValueError: it is no such trace, or nothing of it ran on a GPU for any time.
        OSError: it cannot be read.
    """
    try:
        events = read_json(path.read_bytes(), _Trace).events
        ran = sorted(msgspec.convert(each, _Run) for each in events if each.get("cat") in ON_GPU)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no trace in Chrome's format: {error}") from None
    if not ran:
        raise ValueError(f"nothing in {path} ran on a GPU")
    kernels: dict[str, list[float]] = defaultdict(list)
    for run in ran:
        kernels[run.name].append(run.dur * 1e-6)
    gaps = sorted(_gaps((run.ts, run.end) for run in ran), reverse=True)
    seconds = (max(run.end for run in ran) - ran[0].ts) * 1e-6
    if not seconds:
        raise ValueError(f"what {path} says to have run on a GPU took no time")
    ranked = sorted(kernels.items(), key=lambda kernel: -sum(kernel[1]))
    return Gpu(seconds, sum(gaps) / seconds, gaps, {name: (sum(each), len(each)) for name, each in ranked})


def _gaps(spans: Iterable[tuple[float, float]]) -> list[float]:
    """Seconds between spans in microseconds, which begin in rising order."""
    gaps, end = [], float("inf")
    for start, stop in spans:
        if start > end:
            gaps.append((start - end) * 1e-6)
        end = stop if end == float("inf") else max(end, stop)
    return gaps


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m tpserve.bench.trace", description="What a trace of --profile says of the GPU."
    )
    parser.add_argument("trace", type=Path, metavar="DIR/rank0.json", help="what --profile DIR has written")
    path = parser.parse_args().trace
    try:
        gpu = read_trace(path)
    except OSError as error:
        parser.error(f"{path} cannot be read: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    longest = ", ".join(f"{1e6 * gap:.0f}" for gap in gpu.gaps[:8])
    lines = [f"{1e3 * gpu.seconds:.2f} ms, idle {gpu.idle:.1%}; longest gaps, µs: {longest}"]
    for name, (seconds, runs) in list(gpu.kernels.items())[:SHOWN]:
        lines.append(f"{seconds / gpu.seconds:6.1%} {1e6 * seconds / runs:9.1f} µs × {runs:6}  {name[:100]}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
