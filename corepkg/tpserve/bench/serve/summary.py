"""From the samples of all runs to figures and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tpserve.bench.blocks import random_order
from tpserve.bench.host import about
from tpserve.bench.serve.counters import Counts
from tpserve.bench.serve.load import Sample
from tpserve.bench.serve.measure import Measurement, Plan, Run
from tpserve.bench.serve.results import Latency, Measure, Outcome, Report, Verdict
from tpserve.bench.statistics import compare, curve, quantile, replicate

__all__ = ["seconds", "summarise", "times"]

PACKAGES = ("tpserve", "torch", "httptools", "fastapi", "uvicorn", "uvloop", "msgspec", "numpy", "pyzmq", "pynng")
LATENCIES: tuple[Measure, ...] = ("ttft", "tpot", "itl", "e2el")
MEASURES: tuple[Measure, ...] = ("output_throughput", *LATENCIES)

FEWEST_REPLICATES = 200
MOST_DRAWS = 20_000_000
"""Samples drawn for one interval; past it there are fewer replicates, so that nobody waits for minutes."""

Samples = npt.NDArray[np.float64]


def summarise(plan: Plan, measured: Measurement, argv: Sequence[str]) -> Report:
    """Boil a measurement down."""
    runs = measured.runs
    outcomes, verdicts = [], []
    for rate in range(len(plan.rates)):
        by_arm = [[run for run in runs if (run.rate, run.arm) == (rate, arm)] for arm in range(len(plan.arms))]
        outcomes += [_outcome(plan, found) for found in by_arm]
        if len(by_arm) == 2 and plan.blocks > 1:
            verdicts += _verdicts(plan, rate, *by_arm)
    order = random_order(len(plan.arms), plan.blocks, plan.seed)
    ran = order[: measured.cut_short.blocks if measured.cut_short else None]
    return Report(
        argv=list(argv),
        about=about(PACKAGES),
        plan=plan,
        cut_short=measured.cut_short,
        order=[[plan.arms[arm].name for arm in arms] for arms in ran],
        outcomes=outcomes,
        verdicts=verdicts,
        runs=runs,
    )


def times(samples: Sequence[Sample], measure: Measure) -> Samples:
    """A latency of all requests that were answered, in milliseconds: one figure a request, but of ``itl`` one a gap."""
    answered = [sample for sample in samples if not sample.error]
    match measure:
        case "ttft":
            found = [sample.arrivals[0] - sample.due for sample in answered]
        case "tpot":
            found = [
                (sample.arrivals[-1] - sample.arrivals[0]) / (sample.output_tokens - 1)
                for sample in answered
                if sample.output_tokens > 1
            ]
        case "itl":
            found = [float(gap) for sample in answered for gap in np.diff(sample.arrivals)]
        case "e2el":
            found = [sample.arrivals[-1] - sample.due for sample in answered]
        case _:
            raise ValueError(f"{measure} is no latency")
    return 1000 * np.array(found, dtype=np.float64)


def seconds(samples: Sequence[Sample]) -> float:
    """From the first arrival to the last text; 0 if nothing was answered."""
    return max((sample.arrivals[-1] for sample in samples if not sample.error), default=0.0)


def _outcome(plan: Plan, runs: Sequence[Run]) -> Outcome:
    samples = [sample for run in runs for sample in run.samples]
    answered = [sample for sample in samples if not sample.error]
    late = [1000 * (sample.sent - sample.due) for sample in answered]
    span = sum(seconds(run.samples) for run in runs)
    counted = [run.counted for run in runs if run.counted is not None]
    client = sum((_counts(sample) for sample in answered), Counts())
    latencies = {measure: times(samples, measure) for measure in LATENCIES}

    def per_second(amount: int) -> float:
        return round(amount / span, 3) if span else 0.0

    return Outcome(
        arm=plan.arms[runs[0].arm].name,
        rate=plan.rates[runs[0].rate],
        seconds=round(span, 3),
        completed=len(answered),
        failed=len(samples) - len(answered),
        errors=dict(Counter(sample.error for sample in samples if sample.error).most_common()),
        request_throughput=per_second(len(answered)),
        output_throughput=per_second(client.generation_tokens),
        total_throughput=per_second(client.prompt_tokens + client.generation_tokens),
        latency_ms={measure: _latency(plan, found) for measure, found in latencies.items() if len(found)},
        late_ms=round(float(np.quantile(late, 0.99)), 3) if late else 0.0,
        client=client,
        server=sum(counted, Counts()) if len(counted) == len(runs) else None,
    )


def _counts(sample: Sample) -> Counts:
    return Counts(sample.prompt_tokens, sample.cached_tokens, sample.output_tokens)


def _latency(plan: Plan, samples: Samples) -> Latency:
    figures: dict[str, float | None] = {"mean": float(samples.mean())}
    for percentile in plan.percentiles:
        figures[f"p{percentile:g}"] = quantile(samples, percentile / 100)
    rounded = {name: None if value is None else round(value, 3) for name, value in figures.items()}
    cdf = [(round(value, 3), round(share, 6)) for value, share in curve(samples)]
    return Latency(len(samples), rounded, cdf)


def _verdicts(plan: Plan, rate: int, first: Sequence[Run], second: Sequence[Run]) -> list[Verdict]:
    """What can be said of each figure, by the blocks in which both arms have samples."""
    verdicts = []
    for measure in MEASURES:
        arms = [[_block(run, measure) for run in sorted(runs, key=lambda run: run.block)] for runs in (first, second)]
        both = [(a, b) for a, b in zip(*arms, strict=True) if len(a) and len(b)]
        if len(both) > 1:
            verdicts += _compare(plan, rate, measure, [a for a, _ in both], [b for _, b in both])
    return verdicts


def _block(run: Run, measure: Measure) -> Samples:
    """The samples of a run: of throughput one row, tokens and seconds."""
    if measure != "output_throughput":
        return times(run.samples, measure)
    span = seconds(run.samples)
    return np.array([[sum(sample.output_tokens for sample in run.samples), span]]) if span else np.empty((0, 2))


def _compare(
    plan: Plan, rate: int, measure: Measure, first: Sequence[Samples], second: Sequence[Samples]
) -> list[Verdict]:
    shares = [] if measure == "output_throughput" else [percentile / 100 for percentile in plan.percentiles]

    def statistic(samples: Samples) -> Samples:
        if measure == "output_throughput":
            tokens, span = samples.sum(axis=0)
            return np.array([tokens / span])
        return np.array([samples.mean(), *np.quantile(samples, shares)])

    pooled = [np.concatenate(blocks) for blocks in (first, second)]
    base, other = (statistic(samples) for samples in pooled)
    replicates = min(plan.replicates, max(FEWEST_REPLICATES, MOST_DRAWS // max(map(len, pooled))))
    base_drawn, drawn = (
        replicate(blocks, statistic, seed=plan.seed, stream=stream, replicates=replicates)
        for stream, blocks in enumerate((first, second))
    )
    verdicts = []
    for column, share in enumerate([None, *shares]):
        is_told = share is None or all(quantile(samples, share) is not None for samples in pooled)
        if is_told and min(base_drawn[:, column].min(), drawn[:, column].min()) > 0:
            measured = float(base[column]), float(other[column])
            ratio = compare(measured, (base_drawn[:, column], drawn[:, column])).for_few(len(first))
            verdicts.append(
                Verdict(
                    rate=plan.rates[rate],
                    measure=measure,
                    figure="mean" if share is None else f"p{100 * share:g}",
                    ratio=ratio,
                    verdict=ratio.verdict,
                )
            )
    return verdicts
