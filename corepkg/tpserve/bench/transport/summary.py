"""From the records of all runs to figures and verdicts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tpserve.bench.host import about, needed_by
from tpserve.bench.statistics import compare, curve, quantile, replicate
from tpserve.bench.transport.arms import Arm
from tpserve.bench.transport.measure import Block, Measurement, Plan, order
from tpserve.bench.transport.records import CaseRecord, counts, latencies, span
from tpserve.bench.transport.results import Idle, Latency, Measure, Outcome, Report, Verdict

__all__ = ["summarise"]

PACKAGES = ("tpserve", "torch", "msgspec", "xxhash", "numpy", "pyzmq", "pynng")
MIB = 1 << 20

Samples = npt.NDArray[np.float64]


class _Runs(msgspec.Struct, frozen=True):
    """All runs of one arm on one case.

    Attributes:
        arm: its index.
        latencies: of each run, in microseconds.
        seconds: that each run's rounds took.
        ranks: the records of each run.
    """

    arm: int
    latencies: list[Samples]
    seconds: list[float]
    ranks: list[list[CaseRecord]]

    @property
    def messages(self) -> list[int]:
        """Messages of each run."""
        return [int(counts(ranks[0]).sum()) for ranks in self.ranks]

    @property
    def rates(self) -> Samples:
        """Messages a second of each run; rounds, if they are empty."""
        amounts = [messages or len(counts(ranks[0])) for messages, ranks in zip(self.messages, self.ranks, strict=True)]
        return np.divide(amounts, self.seconds, dtype=np.float64)


def summarise(plan: Plan, measured: Measurement, argv: Sequence[str]) -> Report:
    """Boil a measurement down."""
    outcomes, verdicts = [], []
    for case in range(len(plan.cases)):
        runs = [_runs(plan, measured.blocks, case, arm) for arm in range(len(plan.arms))]
        present = [found for found in runs if found.latencies]
        outcomes += [_outcome(plan.arms[found.arm], case, found) for found in present]
        if present and present[0].arm == 0:
            verdicts += _verdicts(plan, case, present)
    packages = needed_by(
        part.provider.split()[0] for arm in plan.arms for part in (arm.transport, arm.sync) if part
    ).union(PACKAGES)
    ran = order(plan)[: measured.cut_short.blocks if measured.cut_short else None]
    return Report(
        argv=list(argv) or sys.argv,
        about=about(sorted(packages)),
        plan=plan,
        cut_short=measured.cut_short,
        order=[[plan.arms[arm].name for arm in arms] for arms in ran],
        outcomes=outcomes,
        idle=_idle(plan, measured.blocks),
        verdicts=verdicts,
        failures=measured.failures,
    )


def _runs(plan: Plan, blocks: Sequence[Block], case: int, arm: int) -> _Runs:
    found = _Runs(arm, [], [], [])
    for block in sorted(blocks, key=lambda block: block.number):
        if block.arm == arm:
            ranks = [rank.cases[case] for rank in block.ranks]
            found.ranks.append(ranks)
            found.latencies.append(latencies(ranks, plan.load.is_timed))
            is_paced = plan.load.pace == "paced"
            found.seconds.append(float(found.latencies[-1].sum()) / 1e6 if is_paced else span(ranks))
    return found


def _outcome(arm: Arm, case: int, runs: _Runs) -> Outcome:
    samples = np.concatenate(runs.latencies)
    seconds = sum(runs.seconds)
    records = [record for ranks in runs.ranks for record in ranks]
    rounds = sum(len(counts(ranks[0])) for ranks in runs.ranks)
    return Outcome(
        arm=arm.name,
        case=case,
        blocks=len(runs.latencies),
        samples=len(samples),
        latency_us=_latency(samples),
        block_p50_us=[round(float(np.median(block)), 2) for block in runs.latencies],
        messages_per_second=round(sum(runs.messages) / seconds, 1),
        megabytes_per_second=round(sum(ranks[0].sent for ranks in runs.ranks) / seconds / 1e6, 3),
        cpu_seconds_per_1000_rounds=round(sum(record.cpu for record in records) / rounds * 1000, 4),
        peak_memory_mib=round(max(record.peak_memory for record in records) / MIB, 1),
        grown_memory_mib=round(max(record.grown_memory for record in records) / MIB, 1),
        lost=sum(abs(int(counts(ranks[0]).sum() - counts(other).sum())) for ranks in runs.ranks for other in ranks[1:]),
        agreed=all(len({record.digest for record in ranks}) == 1 for ranks in runs.ranks),
        cdf_us=[(round(value, 2), round(share, 6)) for value, share in curve(samples)],
    )


def _latency(samples: Samples) -> Latency:
    def at(share: float) -> float | None:
        value = quantile(samples, share)
        return None if value is None else round(value, 2)

    return Latency(
        mean=round(float(samples.mean()), 2),
        p50=round(float(np.median(samples)), 2),
        p90=at(0.9),
        p99=at(0.99),
        p999=at(0.999),
        max=round(float(samples.max()), 2),
    )


def _verdicts(plan: Plan, case: int, runs: Sequence[_Runs]) -> list[Verdict]:
    """Each arm against the first: latency, or what goes through if it waits for nobody. One block says nothing."""
    replicates = [_replicates(plan, found) for found in runs]
    verdicts = []
    for found, (figures, drawn) in zip(runs[1:], replicates[1:], strict=True):
        base_figures, base_drawn = replicates[0]
        blocks = min(len(runs[0].latencies), len(found.latencies))
        for column, measure in enumerate(_measures(plan)):
            if blocks < 2 or not all(_is_told(measure, arm) for arm in (runs[0], found)):
                continue
            measured = float(base_figures[column]), float(figures[column])
            ratio = compare(measured, (base_drawn[:, column], drawn[:, column])).for_few(blocks)
            verdicts.append(
                Verdict(
                    case=case,
                    baseline=plan.arms[0].name,
                    arm=plan.arms[found.arm].name,
                    measure=measure,
                    ratio=ratio,
                    verdict=ratio.verdict,
                )
            )
    return verdicts


def _measures(plan: Plan) -> tuple[Measure, ...]:
    return ("throughput",) if plan.load.pace == "free" else ("p50", "p99")


def _is_told(measure: Measure, runs: _Runs) -> bool:
    """Whether the figure can be told of so many samples."""
    return measure != "p99" or quantile(np.concatenate(runs.latencies), 0.99) is not None


def _replicates(plan: Plan, runs: _Runs) -> tuple[Samples, Samples]:
    """The figures of an arm and what they might have been."""
    is_free = plan.load.pace == "free"
    blocks = [np.array([rate]) for rate in runs.rates] if is_free else runs.latencies
    statistic = _mean if is_free else _p50_and_p99
    drawn = replicate(blocks, statistic, seed=plan.seed, stream=runs.arm, replicates=plan.replicates)
    return statistic(np.concatenate(blocks)), drawn


def _mean(samples: Samples) -> Samples:
    return np.array([samples.mean()])


def _p50_and_p99(samples: Samples) -> Samples:
    return np.quantile(samples, [0.5, 0.99])


def _idle(plan: Plan, blocks: Sequence[Block]) -> list[Idle]:
    found = []
    for index, arm in enumerate(plan.arms):
        records = [[rank.idle for rank in block.ranks] for block in blocks if block.arm == index]
        shares = [[100 * idle.cpu / idle.wall for idle in ranks if idle] for ranks in records]
        if shares and shares[0]:
            found.append(Idle(arm.name, [round(float(share), 3) for share in np.mean(shares, axis=0)]))
    return found
