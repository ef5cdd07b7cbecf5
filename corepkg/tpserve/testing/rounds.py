"""Whole rounds over a fan-out and a sync, with somebody on the way who damages, loses or repeats a frame."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import pytest

from tpserve.api import FanoutReceiver, FanoutSender, PipeReceiver, RankError, Sync, TransportError
from tpserve.envelope import Sealer
from tpserve.messages import Abort, encode
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.round import Caps, FollowerSource, LeaderSource, Round
from tpserve.testing.lab import Task

__all__ = ["MEDDLING", "Meddler", "check_rounds", "drain"]

WAYS: dict[str, Callable[[bytes], list[bytes]]] = {
    "damages": lambda frame: [frame[:-1] + bytes([frame[-1] ^ 1])],
    "loses": lambda frame: [],
    "repeats": lambda frame: [frame, frame],
}
MEDDLING = pytest.mark.parametrize("way", WAYS)

SIZES = (2, 1, 0, 3, 1, 2, 0, 4)
"""Messages of each round."""

WATCHDOG = 30.0


class Meddler(FanoutSender):
    """Passes frames on to a fan-out, save one.

    Args:
        sender: the fan-out.
        way: what is done to the frame, a name in WAYS.
        victim: which frame it is, counted from 0.

    Attributes:
        passed: frames so far.
    """

    def __init__(self, sender: FanoutSender, way: str, victim: int) -> None:
        self._sender = sender
        self._way = WAYS[way]
        self._victim = victim
        self.passed = 0

    def connect(self, deadline: float) -> None:
        """Connect the fan-out."""
        self._sender.connect(deadline)

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Send what becomes of the frames."""
        sent: list[bytes] = []
        for frame in frames:
            sent += self._way(frame) if self.passed == self._victim else [frame]
            self.passed += 1
        self._sender.send_many(sent, deadline)

    def close(self) -> None:
        """Close the fan-out."""
        self._sender.close()


class _Batches(PipeReceiver):
    """Gives out prepared rounds."""

    def __init__(self, rounds: list[list[bytes]]) -> None:
        self._rounds = rounds

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        return self._rounds.pop(0)

    def close(self) -> None: ...


def check_rounds(syncs: Sequence[Sync], in_order: bool) -> None:
    """Lead and follow eight rounds as ranks do.

    Args:
        syncs: of all ranks, the leader's first, connected.
        in_order: whether all followers must get through. Otherwise each must stop with an error that says which rank
            and which round, and all rounds before must be right.
    """
    sealer = Sealer(1)
    rounds = [[sealer.seal(encode(Abort(uid))) for uid in range(size)] for size in SIZES]
    leader, *followers = syncs
    assert isinstance(leader.context.fanout, FanoutSender)
    source = LeaderSource(_Batches(rounds), leader.context.fanout, leader, DecisionLog(0), Caps(), WATCHDOG, WATCHDOG)
    following = [Task(_follow, sync) for sync in followers]
    led = [source.receive(False) for _ in SIZES]
    for rank, task in enumerate(following, 1):
        seen, error = task.result()
        assert seen == led[: len(seen)], f"rank {rank} has other rounds than the leader"
        if in_order:
            assert error is None, f"rank {rank} stops: {error}"
        else:
            assert error is not None, f"rank {rank} has noticed nothing"
            assert (error.rank, error.round) == (rank, len(seen))


def _follow(sync: Sync) -> tuple[list[Round], RankError | None]:
    """A follower's rounds, and the error that ended them."""
    context = sync.context
    assert isinstance(context.fanout, FanoutReceiver)
    source = FollowerSource(context.fanout, sync, DecisionLog(context.rank), WATCHDOG, context.rank)
    seen: list[Round] = []
    try:
        while len(seen) < len(SIZES):
            seen.append(source.receive(True))
    except RankError as error:
        drain(sync)
        return seen, error
    return seen, None


def drain(sync: Sync) -> None:
    """Take all that is under way to a follower, so that a leader that closes need not wait."""
    fanout = sync.context.fanout
    assert isinstance(fanout, FanoutReceiver)
    for take in (partial(fanout.recv_many, 1), sync.receive):
        with suppress(TransportError):
            while True:
                take(time.monotonic() + 0.2)
