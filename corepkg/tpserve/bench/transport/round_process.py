"""One rank of one block: makes its links as a server's rank does, runs rounds over them and keeps the time."""

from __future__ import annotations

import time
from array import array
from contextlib import ExitStack

import msgspec

from tpserve.api import FanoutSender
from tpserve.bench.transport.ancestor import join_ancestor
from tpserve.bench.transport.board import Board
from tpserve.bench.transport.cases import Case, Load
from tpserve.bench.transport.feeder import Feeder
from tpserve.bench.transport.messages import SMALLEST
from tpserve.bench.transport.meter import Memory, Meter
from tpserve.bench.transport.records import CaseRecord, IdleRecord, Job, RankRecord, pack
from tpserve.launch.child import Line
from tpserve.launch.links import join_fanout, join_sync
from tpserve.launch.post import read_post
from tpserve.messages import Abort, Generate
from tpserve.scheduler.digest import DecisionLog, RoundDecisions
from tpserve.scheduler.round import Caps, FollowerSource, LeaderSource, Round, RoundSource

__all__ = ["main"]

MOST_ROUND_BYTES = 1 << 40


def main(line: Line, payload: msgspec.Raw) -> None:
    """Do a Job and leave a RankRecord."""
    job = read_post(payload, Job)
    with ExitStack() as resources:
        board = Board(job.board, job.ranks, job.rank)
        resources.callback(board.close)
        log = DecisionLog(job.rank)
        feeder = Feeder(board, job.watchdog, job.seed) if job.rank == 0 else None
        source = _join(job, feeder, log, resources)
        resources.callback(source.close)
        record = _Rank(job, source, log, board, feeder).run()
    job.record.write_bytes(msgspec.msgpack.encode(record))


class _Rank:
    """A rank at work; the leader has a feeder."""

    def __init__(self, job: Job, source: RoundSource, log: DecisionLog, board: Board, feeder: Feeder | None) -> None:
        self._job = job
        self._source = source
        self._log = log
        self._board = board
        self._feeder = feeder

    def run(self) -> RankRecord:
        """Run all cases, each after a warm-up, then wait for a while if that is wanted."""
        records = []
        for case in self._job.cases:
            if self._job.warm_up:
                self._measure(Case(case.messages, case.size, min(case.rounds, self._job.warm_up)), Load())
            records.append(self._measure(case, self._job.load))
        idle = self._wait() if self._job.idle else None
        self._meet()
        return RankRecord(records, idle)

    def _measure(self, case: Case, load: Load) -> CaseRecord:
        feeder = self._feeder
        if feeder:
            feeder.prepare(case, load)
        self._meet()
        if feeder:
            feeder.start()
        counts = array("q")
        memory, meter = Memory(), Meter()
        done, goal = 0, case.rounds * (case.messages if load.is_timed else 1)
        while done < goal:
            if feeder:
                feeder.before_round()
            else:
                load.compute()
            meter.enter()
            received = self._source.receive(block=case.messages > 0)
            meter.leave()
            if feeder:
                feeder.after_round()
            self._finish(received)
            counts.append(len(received.messages))
            done += len(received.messages) if load.is_timed else 1
        return CaseRecord(
            starts=pack(feeder.starts if feeder else ()),
            arrivals=pack(feeder.feed.arrivals if feeder else ()),
            ends=pack(meter.ends),
            counts=pack(counts),
            cpu=meter.cpu(),
            peak_memory=memory.peak(),
            grown_memory=memory.grown(),
            sent=feeder.feed.bytes if feeder else 0,
            digest=self._log.latest[1],
        )

    def _wait(self) -> IdleRecord:
        """A round whose only message comes late."""
        self._meet()
        if self._feeder:
            self._feeder.offer_late(self._job.idle, SMALLEST)
        wall, cpu = time.monotonic(), time.process_time()
        received = self._source.receive(block=True)
        record = IdleRecord(time.monotonic() - wall, time.process_time() - cpu)
        self._finish(received)
        return record

    def _finish(self, received: Round) -> None:
        """Fold what was received into the digest that ranks hold each other to."""
        uids = [message.uid for message in received.messages if isinstance(message, Generate | Abort)]
        self._log.fold(received.number, RoundDecisions(uids=uids))
        self._board.advance()

    def _meet(self) -> None:
        self._board.advance()
        self._board.await_others(time.monotonic() + self._job.watchdog)


def _join(job: Job, feeder: Feeder | None, log: DecisionLog, resources: ExitStack) -> RoundSource:
    """Make this rank's links and wait for the others."""
    caps = Caps(max(Caps().messages, *(case.messages for case in job.cases)), MOST_ROUND_BYTES)
    intake = feeder.feed if feeder else None
    transport, sync = job.arm.transport, job.arm.sync
    if transport is None or sync is None:
        return join_ancestor(job.layout, job.rank, job.ranks, intake, caps, job.watchdog, resources)
    deadline = time.monotonic() + job.watchdog
    fanout = join_fanout(transport, job.layout, job.rank, job.ranks, resources, deadline)
    link = join_sync(sync, job.layout, job.rank, job.ranks, fanout, deadline)
    if isinstance(fanout, FanoutSender):
        assert intake is not None
        return LeaderSource(intake, fanout, link, log, caps, job.heartbeat, job.watchdog)
    return FollowerSource(fanout, link, log, job.watchdog, job.rank)
