"""What the leader does so that there are rounds: makes messages, and hands them over at the pace that is wanted."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from random import Random

from tpserve.bench.transport.arrivals import Arrival, bursts, read_trace
from tpserve.bench.transport.board import Board
from tpserve.bench.transport.cases import Case, Load
from tpserve.bench.transport.feed import NANOSECONDS, Feed
from tpserve.bench.transport.messages import Mint

__all__ = ["Feeder"]

MOST_READY = 16 << 20
"""Bytes of paced rounds that are made beforehand, so that the time between rounds does not depend on their size."""
LEAD_TIME = 0.01
"""Seconds before the first timed arrival."""


class Feeder:
    """Feeds the leader's intake, case by case.

    Args:
        board: tells when all ranks have finished a round.
        patience: seconds that they may take.
        seed: of messages and arrivals.

    Attributes:
        feed: the intake.
        starts: when each round's messages were there, in nanoseconds on the monotonic clock.
    """

    def __init__(self, board: Board, patience: float, seed: int) -> None:
        self.feed = Feed()
        self.starts = array("q")
        self._board = board
        self._patience = patience
        self._mint = Mint(seed)
        self._random = Random(seed)
        self._load = Load()
        self._ready: Iterator[list[bytes]] = iter(())
        self._timed: list[tuple[float, bytes]] = []

    def prepare(self, case: Case, load: Load) -> None:
        """Make the messages of a case, as far as they are made beforehand."""
        self._load = load
        self.starts = array("q")
        self.feed.forget()
        if load.is_timed:
            self._timed = [(arrival.at, self._mint.frame(arrival.size)) for arrival in self._arrivals(case, load)]
            return
        rounds = (self._mint.frames(case.messages, case.size) for _ in range(case.rounds))
        is_small = case.rounds * case.messages * case.size <= MOST_READY
        self._ready = iter(list(rounds)) if is_small or load.pace == "free" else rounds

    def start(self) -> None:
        """All ranks are ready for the first round."""
        start = time.monotonic() + LEAD_TIME
        self.feed.offer_at([(round((start + at) * NANOSECONDS), frame) for at, frame in self._timed])
        self._timed = []

    def before_round(self) -> None:
        """Wait for the others if that is the pace, and hand over what the round is to have."""
        if self._load.is_timed:
            return
        frames = next(self._ready)
        if self._load.pace == "paced":
            self._board.await_others(time.monotonic() + self._patience)
            if self._load.gap:
                time.sleep(self._load.gap / 1e6)
            self._load.compute()
        self.feed.offer(frames)

    def after_round(self) -> None:
        """Keep the time."""
        self.starts.append(self.feed.taken_at)

    def offer_late(self, seconds: float, size: int) -> None:
        """Hand over one message that comes in so many seconds."""
        self.feed.offer_at([(time.monotonic_ns() + round(seconds * NANOSECONDS), self._mint.frame(size))])

    def _arrivals(self, case: Case, load: Load) -> list[Arrival]:
        if load.trace is not None:
            return read_trace(load.trace, case.size)
        at_once = case.messages if load.pace == "burst" else 1
        return bursts(case.rounds * case.messages // at_once, at_once, case.size, load.rate, self._random)
