"""``python -m tpserve.testing.sim``: simulate one seed after the other, until something is wrong."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from itertools import count

from tpserve.testing.sim.clients import Failure
from tpserve.testing.sim.simulation import Simulation

EVERY_SECONDS = 10.0


def main() -> int:
    """Simulate; the exit code."""
    arguments = _parser().parse_args()
    shown = started = time.monotonic()
    seeds = rounds = 0
    seen: Counter[str] = Counter()
    for seed in _seeds(arguments):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except Failure as failure:
            traceback.print_exception(failure.__cause__)
            _say(f"seed {seed}: {failure}\nrepeat it: python -m tpserve.testing.sim --seed {seed}")
            return 1
        seeds, rounds = seeds + 1, rounds + simulation.rounds
        seen += simulation.seen
        now = time.monotonic()
        if now - shown > EVERY_SECONDS:
            shown = now
            _show(seeds, rounds)
        if now - started > 60 * arguments.minutes or rounds >= arguments.rounds:
            break
    _show(seeds, rounds)
    if arguments.verbose:
        for name, number in sorted(seen.items()):
            _say(f"{number:8,}  {name}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpserve.testing.sim", description=__doc__)
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, help="this one only")
    seeds.add_argument("--seeds", metavar="A:B", default="0:", help="from A, up to B if there is one (default: 0:)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--rounds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what has happened, and how often")
    return parser


def _seeds(arguments: argparse.Namespace) -> Iterator[int]:
    if arguments.seed is not None:
        return iter([arguments.seed])
    first, _, last = arguments.seeds.partition(":")
    return iter(range(int(first or 0), int(last)) if last else count(int(first or 0)))


def _show(seeds: int, rounds: int) -> None:
    seconds = time.process_time()
    pace = 60 * rounds / seconds
    _say(f"{seeds:,} seeds, {rounds:,} rounds in {seconds:.1f} s of one core: {pace:,.0f} a minute")


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
