"""Runs the arms against each other: in every block each arm once, in fresh processes and in random order."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from tpserve.bench.blocks import CutShort, random_order, signal_of
from tpserve.bench.statistics import REPLICATES
from tpserve.bench.transport.arms import Arm
from tpserve.bench.transport.board import Board
from tpserve.bench.transport.cases import Case, Load
from tpserve.bench.transport.records import Job, RankRecord
from tpserve.config import ServeConfig
from tpserve.launch.affinity import place_ranks
from tpserve.launch.layout import Layout
from tpserve.launch.logging import rank_place
from tpserve.launch.post import write_post
from tpserve.launch.process import Start
from tpserve.launch.protocol import ChildSpec
from tpserve.launch.rundir import RunDir
from tpserve.launch.trouble import SETTLE_SECONDS, Trouble, find_cause, trouble_of
from tpserve.launch.watch import Exited, Happening, Signalled, Watch

__all__ = ["Block", "Failure", "Measurement", "Plan", "measure", "order"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured.

    Attributes:
        arms: which arms; the first is the baseline.
        cases: on each, in this order.
        load: how rounds follow each other.
        ranks: how many ranks each arm has, ≥ 2.
        blocks: how often each arm runs.
        warm_up: rounds before each case that do not count.
        idle: seconds of idling at the end of each run, or 0.
        heartbeat: seconds between an idle leader's signs of life.
        watchdog: seconds of silence after which a rank gives up.
        cpu_affinity: as in ``ServeConfig``.
        seed: of the order, the messages, the arrivals and the statistics.
        replicates: of the bootstrap, for each interval.
    """

    arms: list[Arm]
    cases: list[Case]
    load: Load
    ranks: int = 2
    blocks: int = 10
    warm_up: int = 50
    idle: float = 0.0
    heartbeat: float = 1.0
    watchdog: float = 30.0
    cpu_affinity: str = "auto"
    seed: int = 0
    replicates: int = REPLICATES


class Block(msgspec.Struct, frozen=True):
    """What one run of one arm brought.

    Attributes:
        number: of the block.
        arm: index in ``Plan.arms``.
        ranks: the record of each rank, the leader's first.
    """

    number: int
    arm: int
    ranks: list[RankRecord]


class Failure(msgspec.Struct, frozen=True):
    """A run that broke off, and why."""

    block: int
    arm: str
    error: str


class Measurement(msgspec.Struct, frozen=True):
    """All runs, in the order in which they were made; of those that a signal ended the whole blocks."""

    blocks: list[Block]
    failures: list[Failure]
    cut_short: CutShort | None = None


Progress = Callable[[str], None]
"""Called after each run with what was run."""


def order(plan: Plan) -> list[list[int]]:
    """For each block the arms in the order in which they run; a function of the seed."""
    return random_order(len(plan.arms), plan.blocks, plan.seed)


def measure(plan: Plan, progress: Progress) -> Measurement:
    """Run everything, or until a signal comes. No process or file is left, whatever way it ends.

    Raises:
        KeyboardInterrupt: a signal, its argument, came before a whole block was there.
        ConfigError: ``cpu_affinity`` is not understood.
    """
    found = Measurement([], [])
    runs = [(number, arm) for number, arms in enumerate(order(plan)) for arm in arms]
    try:
        with RunDir.create() as run_dir, closing(Watch()) as watch, watch.signals(signal.SIGINT, signal.SIGTERM):
            for generation, (number, arm) in enumerate(runs, 1):
                try:
                    records = _run(plan, arm, number, Layout(run_dir.path, generation), watch)
                    found.blocks.append(Block(number, arm, records))
                except Trouble as trouble:
                    found.failures.append(Failure(number, plan.arms[arm].name, trouble.report))
                progress(plan.arms[arm].name)
    except KeyboardInterrupt as stop:
        whole = (len(found.blocks) + len(found.failures)) // len(plan.arms)
        if not whole:
            raise
        return Measurement(
            [block for block in found.blocks if block.number < whole],
            [failure for failure in found.failures if failure.block < whole],
            CutShort(whole, signal_of(stop)),
        )
    return found


def _run(plan: Plan, arm: int, block: int, layout: Layout, watch: Watch) -> list[RankRecord]:
    """One arm once, over all cases."""
    layout.create()
    board = Board.create(plan.ranks)
    records = [layout.directory / f"rank{rank}.record" for rank in range(plan.ranks)]
    try:
        for start in _starts(plan, arm, block, layout, board, records):
            watch.start(start)
        _await_end(watch)
        return [msgspec.msgpack.decode(record.read_bytes(), type=RankRecord) for record in records]
    finally:
        watch.end(list(watch.children), grace=0.0)
        os.close(board)
        layout.remove()


def _starts(plan: Plan, arm: int, block: int, layout: Layout, board: int, records: Sequence[Path]) -> list[Start]:
    places = place_ranks(ServeConfig(tp=plan.ranks, cpu_affinity=plan.cpu_affinity), "cpu")
    starts = []
    for rank, (place, record) in enumerate(zip(places, records, strict=True)):
        job = Job(
            layout=layout,
            rank=rank,
            ranks=plan.ranks,
            arm=plan.arms[arm],
            load=plan.load,
            cases=plan.cases,
            warm_up=plan.warm_up,
            idle=plan.idle,
            heartbeat=plan.heartbeat,
            watchdog=plan.watchdog,
            seed=plan.seed + block,
            board=board,
            record=record,
        )
        spec = ChildSpec(
            name=f"rank{rank}",
            place=rank_place(rank),
            main="tpserve.bench.transport.round_process:main",
            payload=write_post(job),
            cpus=place.cpus,
            log_level="warning",
        )
        starts.append(Start(spec, {"OMP_NUM_THREADS": "1"}, (board,)))
    return starts


def _await_end(watch: Watch) -> None:
    """Wait until all ranks have left in good order.

    Raises:
        Trouble: one has not; the likely cause of what was seen.
        KeyboardInterrupt: a signal came.
    """
    troubles: list[Trouble] = []
    deadline = math.inf
    while watch.children and (happening := watch.next(deadline)) is not None:
        if isinstance(happening, Signalled):
            raise KeyboardInterrupt(happening.signum)
        trouble = None if _left_in_order(happening) else trouble_of(happening)
        if trouble is not None:
            troubles.append(trouble)
            deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
    if troubles:
        raise find_cause(troubles)


def _left_in_order(happening: Happening) -> bool:
    return isinstance(happening, Exited) and happening.child.exit_code == 0
