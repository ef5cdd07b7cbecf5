"""Runs the load on every arm: in every block each arm once, on a fresh server, in random order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import httpx
import msgspec

from tpserve.bench.blocks import random_order
from tpserve.bench.client import open_client, served_model
from tpserve.bench.serve.arms import Arm
from tpserve.bench.serve.arrivals import Rate, arrival_times
from tpserve.bench.serve.counters import Counts, scrape
from tpserve.bench.serve.load import Sample, drive
from tpserve.bench.serve.prompts import Workload, make_prompts, request
from tpserve.bench.statistics import REPLICATES

__all__ = ["Plan", "Run", "measure"]


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


Progress = Callable[[str], None]
"""Called after each run with the name of its arm."""


def measure(plan: Plan, progress: Progress) -> list[Run]:
    """Run everything. No server that was started is left, whatever way it ends.

    Raises:
        ConfigError: prompts cannot be had.
        LaunchError: a server does not start, or none answers.
    """
    runs: list[Run] = []
    for block, arms in enumerate(random_order(len(plan.arms), plan.blocks, plan.seed)):
        for arm in arms:
            with plan.arms[arm].serving() as url:
                runs += asyncio.run(_measure_server(plan, url, block, arm, progress))
    return runs


async def _measure_server(plan: Plan, url: str, block: int, arm: int, progress: Progress) -> list[Run]:
    """All rates on one server."""
    async with open_client(url) as client:
        model = plan.model or await served_model(client)
        await _warm_up(plan, client, model, block)
        runs = []
        for rate in range(len(plan.rates)):
            runs.append(await _run(plan, client, model, block, arm, rate))
            progress(plan.arms[arm].name)
        return runs


async def _warm_up(plan: Plan, client: httpx.AsyncClient, model: str, block: int) -> None:
    workload = msgspec.structs.replace(plan.workload, num_prompts=plan.warm_ups)
    prompts = make_prompts(workload, Random(f"{plan.seed}/{block}/warm-up"))
    requests = [request(workload, prompt, model) for prompt in prompts]
    await drive(client, requests, [0.0] * len(requests), max_concurrency=1)


async def _run(plan: Plan, client: httpx.AsyncClient, model: str, block: int, arm: int, rate: int) -> Run:
    """One rate; its prompts and arrivals are those of the other arms, and of no other run."""
    random = Random(f"{plan.seed}/{block}/{rate}")
    prompts = make_prompts(plan.workload, random)
    arrivals = arrival_times(len(prompts), plan.rates[rate], plan.burstiness, random)
    requests = [request(plan.workload, prompt, model) for prompt in prompts]
    before = await scrape(client)
    samples = await drive(client, requests, arrivals, plan.max_concurrency)
    after = await scrape(client)
    counted = after - before if before and after else None
    return Run(block=block, arm=arm, rate=rate, samples=samples, counted=counted)
