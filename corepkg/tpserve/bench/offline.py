"""Engines without a server, one choice of settings against another: ``tpserve bench offline``.

The engines of all arms are up the whole time and take turns, so that a drift of the machine's speed meets all of them.
Every repeat has prompts of its own, so a prefix cache finds nothing but what a workload itself shares.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from random import Random
from statistics import median
from typing import Any

import msgspec
import numpy as np

from tpserve.bench import workload
from tpserve.bench.host import About, about
from tpserve.bench.statistics import REPLICATES, Ratio, compare, replicate
from tpserve.bench.workload import Workload
from tpserve.messages import SamplingParams
from tpserve.offline.llm import LLM
from tpserve.offline.running import plan_engine
from tpserve.settings import load_settings

__all__ = ["WORKLOADS", "Arm", "Plan", "Report", "Run", "measure"]

APART = 1_000_000
LARGEST = 40_000
WARM_UP = 8
"""Requests of the run that does not count."""

PACKAGES = ("tpserve", "torch", "transformers")

WORKLOADS: dict[str, Callable[[int, int, int], Workload]] = {
    "mixed": lambda requests, seed, vocab: workload.mixed(requests, seed),
    "stream": lambda requests, seed, vocab: Workload(workload.fixed(requests, 100, seed, vocab), [256] * requests),
    "fixed": lambda requests, seed, vocab: Workload(workload.fixed(requests, 128, seed, vocab), [64] * requests),
    "shared": lambda requests, seed, vocab: workload.shared_prefix(8, -(-requests // 8), 512, 32, 16, seed, vocab),
}
"""By name: from a number of requests, a seed and the largest id."""


class Plan(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        model: a folder, a .gguf file or a hub id; empty: the embedded default model.
        workload: a name in WORKLOADS.
        requests: how many, all at once.
        repeats: runs of each arm that count.
        seed: of the first run's prompts, and of the order of arms.
    """

    model: str
    workload: str
    requests: int
    repeats: int
    seed: int


class Run(msgspec.Struct, frozen=True):
    """One workload on one engine.

    Attributes:
        seconds: from the first request to the last token.
        prompt_tokens: in all prompts.
        cached_tokens: how many of them were found in the prefix cache.
        output_tokens: generated.
        first_seconds: the same for one token of each prompt, on other prompts; for what takes a step, where all
            prompts and outputs are equally long.
        tpot: seconds a token after the first, by difference.
    """

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_seconds: float | None = None
    tpot: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds


class Arm(msgspec.Struct, frozen=True):
    """One choice of settings and its runs.

    Attributes:
        settings: beside the defaults.
        start_seconds: until its engine was ready.
        runs: in the order of the repeats.
        tokens_per_second: the median of the runs.
    """

    settings: dict[str, Any]
    start_seconds: float
    runs: list[Run]
    tokens_per_second: float


class Report(msgspec.Struct, frozen=True):
    """All that was measured, and with what.

    Attributes:
        about: machine and versions.
        plan: what was measured.
        arms: by name.
        ratios: tokens a second of each arm over the first one's.
    """

    about: About
    plan: Plan
    arms: dict[str, Arm]
    ratios: dict[str, Ratio | None]


def measure(
    plan: Plan, arms: Mapping[str, Mapping[str, Any]], note: Callable[[str, int, Run], None] = lambda *_: None
) -> Report:
    """Run a workload on each arm, in turn.

    Args:
        plan: what to measure.
        arms: settings by name; the first is what the others are held against.
        note: called after each run with the arm, the repeat (-1: the warm-up) and the run.

    Raises:
        UserError: a setting is wrong, or an engine cannot be started.
    """
    for settings in arms.values():  # a mistake in the last one need not wait until the others are loaded
        plan_engine(load_settings({"model": plan.model, **settings}, [], None, os.environ, label=str))
    order = Random(plan.seed)
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    with ExitStack() as engines:
        llms, starts = {}, {}
        for name, settings in arms.items():
            begun = time.monotonic()
            llms[name] = engines.enter_context(LLM(plan.model, **settings))
            starts[name] = time.monotonic() - begun
        largest = min(LARGEST, *(llm.limits.vocab_size - 1 for llm in llms.values()))
        for repeat in range(-1, plan.repeats):
            requests = plan.requests if repeat >= 0 else min(plan.requests, WARM_UP)
            work = WORKLOADS[plan.workload](requests, _seed(plan, repeat), largest)
            for name in order.sample(list(arms), len(arms)):
                run = _run(llms[name], work)
                if plan.workload == "fixed":
                    run = _with_steps(run, _run(llms[name], _first_tokens(plan, repeat, largest)), work.outputs[0])
                note(name, repeat, run)
                if repeat >= 0:
                    runs[name].append(run)
    speeds = {name: [run.tokens_per_second for run in each] for name, each in runs.items()}
    first = next(iter(arms))
    return Report(
        about=about(PACKAGES),
        plan=plan,
        arms={name: Arm(dict(arms[name]), starts[name], runs[name], median(speeds[name])) for name in arms},
        ratios={name: _ratio(speeds[first], speeds[name], plan.seed) for name in arms if name != first},
    )


def _run(llm: LLM, work: Workload) -> Run:
    params = [
        SamplingParams(temperature=work.temperature, max_tokens=output, ignore_eos=True, seed=index)
        for index, output in enumerate(work.outputs)
    ]
    begun = time.monotonic()
    completions = llm.generate(work.prompts, params)
    seconds = time.monotonic() - begun
    return Run(
        seconds=seconds,
        prompt_tokens=sum(each.prompt_tokens for each in completions),
        cached_tokens=sum(each.cached_tokens for each in completions),
        output_tokens=sum(len(each.token_ids) for each in completions),
    )


def _seed(plan: Plan, repeat: int) -> int:
    """Another for each repeat; the first that counts has the plan's own."""
    return plan.seed + (repeat if repeat >= 0 else plan.repeats)


def _first_tokens(plan: Plan, repeat: int, largest: int) -> Workload:
    """One token of each of as many prompts, which share no prefix with those of any repeat."""
    work = WORKLOADS[plan.workload](plan.requests, _seed(plan, repeat) + APART, largest)
    return Workload(work.prompts, [1] * len(work.prompts))


def _with_steps(run: Run, first: Run, output: int) -> Run:
    tpot = (run.seconds - first.seconds) / (output - 1)
    return msgspec.structs.replace(run, first_seconds=first.seconds, tpot=tpot)


def _ratio(base: Sequence[float], other: Sequence[float], seed: int) -> Ratio | None:
    """Of two arms' speeds, run by run beside each other; None for a single run."""
    if len(base) < 2:
        return None

    def replicates(speeds: Sequence[float], stream: int) -> Any:
        blocks = [np.array([speed]) for speed in speeds]
        return replicate(blocks, np.median, seed=seed, stream=stream, replicates=REPLICATES)

    measured = (median(base), median(other))
    return compare(measured, (replicates(base, 0), replicates(other, 1))).for_few(len(base))
