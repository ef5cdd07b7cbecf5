"""Sums between ranks on the CPU, by rows: ``gloo`` against ``shm``.

    python benchmarks/sums_cpu.py --ranks 2

Rows of float32 as wide as the default model is; one thread a rank; the comms take turns in the same processes, 500 sums
each in a row. One JSON line for each number of rows: microseconds a sum on rank 0, medians of those.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing as processes

from tpserve.api import Comm, CommContext, Options
from tpserve.bench.arguments import whole
from tpserve.plugins.builtin import tpserve_comms
from tpserve.testing.processes import load

WIDTH = 576
SUMS, TURNS = 500, 5
NAMES = ("gloo", "shm")


def clocked(comm: Comm, rows: int) -> list[float]:
    """Microseconds of each of some sums in a row."""
    x = torch.zeros(rows, WIDTH)
    took = []
    for _ in range(SUMS):
        begun = time.perf_counter()
        comm.all_reduce(x)
        took.append(1e6 * (time.perf_counter() - begun))
    return took


def rank(number: int, ranks: int, rows: list[int], folder: str) -> None:
    """Measure, and let rank 0 print."""
    torch.set_num_threads(1)
    specs = {spec.name: spec for spec in tpserve_comms()}

    def made(name: str) -> Comm:
        build: Callable[[Options, CommContext], Comm] = load(specs[name].factory)
        return build(specs[name].options(), CommContext(number, ranks, Path(folder), name, "cpu", 60.0))

    comms = {name: made(name) for name in NAMES}
    for some in rows:
        took: dict[str, list[float]] = {name: [] for name in NAMES}
        for _ in range(TURNS):
            for name, comm in comms.items():
                took[name] += clocked(comm, some)
        if not number:
            medians = {name: round(statistics.median(times), 1) for name, times in took.items()}
            print(json.dumps({"ranks": ranks, "rows": some, **medians}), flush=True)
    for comm in comms.values():
        comm.close()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=whole(2, 64), default=2)
    parser.add_argument("--rows", type=whole(1, 1 << 16), nargs="+", default=[1, 16, 128])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(rank, (options.ranks, options.rows, folder), options.ranks)


if __name__ == "__main__":
    main()
