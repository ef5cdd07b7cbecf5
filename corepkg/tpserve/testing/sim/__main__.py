"""``python -m tpserve.testing.sim``: simulate one seed after the other, until something is wrong."""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

from tpserve.testing.sim.clients import Failure
from tpserve.testing.sim.simulation import Simulation

EVERY_SECONDS = 10.0


def main() -> int:
    """Simulate; the exit code."""
    arguments = _parser().parse_args()
    shown = started = time.monotonic()
    seeds = rounds = 0
    seen: Counter[str] = Counter()
    for seed in [arguments.seed] if arguments.seed is not None else arguments.seeds:
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong."""
        self.exit(2, f"error: {message}; {self.prog} --help says more\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m tpserve.testing.sim", description=__doc__)
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, help="this one only")
    seeds.add_argument(
        "--seeds", metavar="A:B", type=_seeds, default="0:", help="from A, up to B if there is one (default: 0:)"
    )
    parser.add_argument("--minutes", type=_positive, default=float("inf"), help="stop after so many")
    parser.add_argument("--rounds", type=_positive, default=float("inf"), help="stop after so many")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what has happened, and how often")
    return parser


def _seeds(text: str) -> Iterable[int]:
    found = re.fullmatch(r"(\d*):(\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, two numbers of which either may be left out")
    first, last = int(found[1] or 0), int(found[2] or sys.maxsize)
    if first >= last:
        raise argparse.ArgumentTypeError(f"{text!r} holds no seed")
    return range(first, last)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number larger than 0")
    return number


def _show(seeds: int, rounds: int) -> None:
    seconds = time.process_time()
    pace = 60 * rounds / seconds
    _say(f"{seeds:,} seeds, {rounds:,} rounds in {seconds:.1f} s of one core: {pace:,.0f} a minute")


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
