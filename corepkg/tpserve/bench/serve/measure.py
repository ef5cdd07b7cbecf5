"""Runs the load on every arm: in every block each arm once, on a fresh server, in random order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from tpserve.bench.blocks import CutShort, random_order, signal_of
from tpserve.bench.client import served_model
from tpserve.bench.http import Origin, read_origin
from tpserve.bench.serve.arms import Arm
from tpserve.bench.serve.arrivals import Rate, arrival_times
from tpserve.bench.serve.counters import Counts, scrape
from tpserve.bench.serve.load import Sample, drive
from tpserve.bench.serve.prompts import Prompts, Workload, request
from tpserve.bench.statistics import REPLICATES

__all__ = ["Measurement", "Plan", "Run", "measure"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured.

    Attributes:
        arms: one or two; the first is the baseline.
        workload: the requests of each run.
        rates: how fast they arrive; a run for each.
        burstiness: of the arrivals, see :func:`tpserve.bench.serve.arrivals.arrival_times`.
        max_concurrency: the most requests in flight; None: no limit.
        blocks: how often each arm runs.
        warm_ups: requests to each server, one after the other, that do not count.
        percentiles: of latencies, to be told.
        model: its name in requests; empty: the first that the server has.
        seed: of prompts, arrivals, the order and the statistics.
        replicates: of the bootstrap, for each interval.
    """

    arms: list[Arm]
    workload: Workload
    rates: list[Rate]
    burstiness: float = 1.0
    max_concurrency: int | None = None
    blocks: int = 1
    warm_ups: int = 1
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    model: str = ""
    seed: int = 0
    replicates: int = REPLICATES


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one rate on one arm in one block brought.

    Attributes:
        block: its number.
        arm: index in ``Plan.arms``.
        rate: index in ``Plan.rates``.
        samples: of the requests, in the order of their arrival.
        counted: what the server counted meanwhile; None if it does not tell.
    """

    block: int
    arm: int
    rate: int
    samples: list[Sample]
    counted: Counts | None


class Measurement(msgspec.Struct, frozen=True):
    """All runs, in the order in which they were made; of those that a signal ended the whole blocks."""

    runs: list[Run]
    cut_short: CutShort | None = None


Progress = Callable[[str], None]
"""Called after each run with the name of its arm."""


def measure(plan: Plan, progress: Progress) -> Measurement:
    """Run everything, or until a signal comes. No server that was started is left, whatever way it ends.

    Raises:
        KeyboardInterrupt: a signal came before a whole block was there.
        ConfigError: prompts cannot be had.
        LaunchError: a server does not start, or none answers.
    """
    prompts = Prompts(plan.workload)
    runs: list[Run] = []
    try:
        for block, arms in enumerate(random_order(len(plan.arms), plan.blocks, plan.seed)):
            for arm in arms:
                with plan.arms[arm].serving() as url:
                    runs += asyncio.run(_Turn(plan, prompts, block, arm).run(url, progress))
    except KeyboardInterrupt as stop:
        whole = len(runs) // (len(plan.arms) * len(plan.rates))
        if not whole:
            raise
        return Measurement([run for run in runs if run.block < whole], CutShort(whole, signal_of(stop)))
    return Measurement(runs)


class _Turn:
    """One arm in one block: all rates on one server."""

    def __init__(self, plan: Plan, prompts: Prompts, block: int, arm: int) -> None:
        self._plan = plan
        self._prompts = prompts
        self._block = block
        self._arm = arm

    async def run(self, url: str, progress: Progress) -> list[Run]:
        plan, origin = self._plan, read_origin(url)
        model = plan.model or await served_model(origin)
        warm_up = self._requests("warm-up", plan.warm_ups, model)
        await drive(origin, warm_up, [0.0] * len(warm_up), max_concurrency=1)
        runs = []
        for rate in range(len(plan.rates)):
            runs.append(await self._measure(origin, model, rate))
            progress(plan.arms[self._arm].name)
        return runs

    async def _measure(self, origin: Origin, model: str, rate: int) -> Run:
        plan = self._plan
        requests = self._requests(rate, plan.workload.num_prompts, model)
        random = Random(f"{plan.seed}/{self._block}/{rate}/arrivals")
        arrivals = arrival_times(len(requests), plan.rates[rate], plan.burstiness, random)
        before = await scrape(origin)
        samples = await drive(origin, requests, arrivals, plan.max_concurrency)
        after = await scrape(origin)
        counted = after - before if before and after else None
        return Run(block=self._block, arm=self._arm, rate=rate, samples=samples, counted=counted)

    def _requests(self, what: object, count: int, model: str) -> list[tuple[str, dict[str, Any]]]:
        """Requests that are the same for all arms, and for nothing else."""
        prompts = self._prompts.draw(count, Random(f"{self._plan.seed}/{self._block}/{what}"))
        return [request(self._plan.workload, prompt, model) for prompt in prompts]
