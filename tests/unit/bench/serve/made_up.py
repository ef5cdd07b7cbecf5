"""A comparison of two servers as if it had been made, the second twice as slow."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tpserve.bench.serve.arms import Arm
from tpserve.bench.serve.arrivals import Rate
from tpserve.bench.serve.counters import Counts
from tpserve.bench.serve.load import Sample
from tpserve.bench.serve.measure import Plan, Run
from tpserve.bench.serve.prompts import Workload

__all__ = ["REQUESTS", "make_plan", "make_runs"]

REQUESTS = 60
ARMS = [Arm("A", ["--sync", "<gloo> & so on"], composition={"tp": 1}), Arm("B", ["--sync", "shm"])]


def make_plan(rates: Sequence[Rate] = (None,), arms: Sequence[Arm] = ARMS, blocks: int = 5) -> Plan:
    return Plan(
        arms=list(arms),
        workload=Workload(num_prompts=REQUESTS, input_len=10, output_len=5),
        rates=list(rates),
        blocks=blocks,
        seed=7,
        replicates=200,
    )


def make_runs(plan: Plan, slowness: Sequence[float] = (1.0, 2.0)) -> list[Run]:
    """Five tokens each: the first after about 100 ms, the others 10 ms apart, times what makes an arm slower."""
    runs = []
    for block in range(plan.blocks):
        for arm in range(len(plan.arms)):
            for rate in range(len(plan.rates)):
                random = Random(f"{block}/{arm}/{rate}")
                samples = [sample(0.01 * number, slowness[arm], random) for number in range(REQUESTS)]
                counted = Counts(10 * REQUESTS, 0, 5 * REQUESTS)
                runs.append(Run(block=block, arm=arm, rate=rate, samples=samples, counted=counted))
    return runs


def sample(due: float, slowness: float, random: Random) -> Sample:
    first = due + 0.1 * slowness * random.uniform(0.9, 1.1)
    arrivals = [first + 0.01 * slowness * number for number in range(5)]
    return Sample(due=due, sent=due + 0.001, arrivals=arrivals, prompt_tokens=10, output_tokens=5)
