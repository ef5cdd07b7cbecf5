"""What the processes of one block are told, and what they leave behind."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tpserve.bench.transport.arms import Arm
from tpserve.bench.transport.cases import Case, Load
from tpserve.launch.layout import Layout

__all__ = ["CaseRecord", "IdleRecord", "Job", "RankRecord", "counts", "latencies", "pack", "span"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of one block does.

    Attributes:
        layout: where the ranks meet.
        rank: this rank.
        ranks: how many there are.
        arm: over which parts.
        load: how rounds follow each other.
        cases: in this order.
        warm_up: rounds before each case that do not count.
        idle: seconds that all wait for nothing, for the CPU time that this takes; 0: not at all.
        heartbeat: seconds between the leader's signs of life.
        watchdog: seconds of silence after which a rank gives up.
        seed: of the messages and of their arrivals; the same for every arm of a block.
        board: inherited descriptor of the :class:`~tpserve.bench.transport.board.Board`.
        record: where the :class:`RankRecord` is to be left.
    """

    layout: Layout
    rank: int
    ranks: int
    arm: Arm
    load: Load
    cases: list[Case]
    warm_up: int
    idle: float
    heartbeat: float
    watchdog: float
    seed: int
    board: int
    record: Path


class CaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One case on one rank; times in nanoseconds on the monotonic clock, which all processes share.

    Attributes:
        starts: leader only: when each round's messages were there, as packed int64.
        arrivals: leader only: when each message arrived, as packed int64.
        ends: when this rank held each round's messages, as packed int64.
        counts: messages of each round, as packed int64.
        cpu: CPU seconds of the whole process, without what the main thread did between rounds.
        peak_memory: the most bytes of memory that the process held.
        grown_memory: how much of that was taken during the case.
        sent: leader only: bytes of all messages.
        digest: of all decisions up to the end.
    """

    starts: bytes
    arrivals: bytes
    ends: bytes
    counts: bytes
    cpu: float
    peak_memory: int
    grown_memory: int
    sent: int
    digest: int


class IdleRecord(msgspec.Struct, frozen=True):
    """Waiting for nothing: how long and at which CPU time, in seconds."""

    wall: float
    cpu: float


class RankRecord(msgspec.Struct, frozen=True):
    """All that one rank measured, case by case."""

    cases: list[CaseRecord]
    idle: IdleRecord | None


def pack(values: Sequence[int]) -> bytes:
    """Numbers as packed int64."""
    return (values if isinstance(values, array) else array("q", values)).tobytes()


def latencies(ranks: Sequence[CaseRecord], is_timed: bool) -> npt.NDArray[np.float64]:
    """How long it took until every rank held the messages, in microseconds.

    Args:
        ranks: one case on all ranks, the leader first.
        is_timed: messages arrived by themselves: one figure a message, from its arrival on, else one a round.
    """
    ends = np.stack([_unpack(record.ends) for record in ranks]).max(axis=0)
    leader = ranks[0]
    if is_timed:
        ends = np.repeat(ends, counts(leader))
    begins = _unpack(leader.arrivals if is_timed else leader.starts)
    return np.asarray((ends - begins) / 1e3, dtype=np.float64)


def counts(record: CaseRecord) -> npt.NDArray[np.int64]:
    """How many messages each round had."""
    return _unpack(record.counts)


def span(ranks: Sequence[CaseRecord]) -> float:
    """Seconds from the first message there to the last round over, on all ranks."""
    first = min(_unpack(ranks[0].arrivals)[:1].min(initial=2**62), _unpack(ranks[0].starts)[0])
    last = max(_unpack(record.ends)[-1] for record in ranks)
    return float(last - first) / 1e9


def _unpack(values: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(values, dtype=np.int64)
