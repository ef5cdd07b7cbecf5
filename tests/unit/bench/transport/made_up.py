"""A measurement whose figures are known beforehand."""

from __future__ import annotations

import numpy as np

from tpserve.bench.transport.arms import Arm
from tpserve.bench.transport.cases import Case, Load
from tpserve.bench.transport.measure import Block, Measurement, Plan, order
from tpserve.bench.transport.records import CaseRecord, IdleRecord, RankRecord, pack

GAP = 1_000_000
MEDIANS = {"slow": 200.0, "fast": 50.0, "same": 200.0}
"""Microseconds."""


def make_plan(load: Load | None = None) -> Plan:
    """Three arms, three cases."""
    return Plan(
        arms=[Arm(name) for name in MEDIANS],
        cases=[Case(0, 0, 400), Case(1, 300, 400), Case(4, 300, 400)],
        load=load or Load(),
        blocks=5,
        idle=2.0,
        seed=7,
        replicates=200,
    )


def make_measurement(plan: Plan) -> Measurement:
    """Every round takes the arm's median, more or less, on rank 1, and half of that on rank 0."""
    rng = np.random.default_rng(11)
    blocks = []
    for number, arms in enumerate(order(plan)):
        for arm in arms:
            ranks: list[list[CaseRecord]] = [[], []]
            for case in plan.cases:
                taken = 1000 * MEDIANS[plan.arms[arm].name] * rng.lognormal(0, 0.1, case.rounds)
                starts = np.arange(case.rounds) * GAP + GAP
                for rank, share in enumerate((0.5, 1.0)):
                    ranks[rank].append(_record(case, rank, starts, (starts + share * taken).astype(int)))
            records = [RankRecord(cases, IdleRecord(2.0, 0.002 * (1 + rank))) for rank, cases in enumerate(ranks)]
            blocks.append(Block(number, arm, records))
    return Measurement(blocks, [])


def _record(case: Case, rank: int, starts: np.ndarray, ends: np.ndarray) -> CaseRecord:
    is_leader = rank == 0
    return CaseRecord(
        starts=pack(starts.tolist()) if is_leader else b"",
        arrivals=pack(np.repeat(starts, case.messages).tolist()) if is_leader else b"",
        ends=pack(ends.tolist()),
        counts=pack([case.messages] * case.rounds),
        cpu=0.05,
        peak_memory=(40 + rank) << 20,
        grown_memory=1 << 20,
        sent=case.rounds * case.messages * case.size if is_leader else 0,
        digest=99,
    )
