"""Engines without a server, one choice of settings against another: ``tpserve bench offline``.

The engines of all arms are up the whole time and take turns, so that a drift of the machine's speed meets all of them.
Every repeat has prompts of its own, so a prefix cache finds nothing but what a workload itself shares.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
import numpy as np

from tpserve.bench import workload
from tpserve.bench.host import About, about
from tpserve.bench.statistics import REPLICATES, Ratio, compare, replicate
from tpserve.bench.workload import Workload
from tpserve.errors import ConfigError, RequestError
from tpserve.frontend.fit import fit
from tpserve.launch.banner import describe
from tpserve.launch.plan import Plan as EnginePlan
from tpserve.messages import SamplingParams
from tpserve.offline.llm import LLM
from tpserve.offline.running import plan_engine
from tpserve.outputs import check_apart, inputs, outputs
from tpserve.settings import load_settings
from tpserve.step import MOST_PAGES, EngineLimits

__all__ = ["LONGEST", "WORKLOADS", "Arm", "Plan", "Report", "Run", "measure"]

APART = 1_000_000
LARGEST = 40_000
WARM_UP = 8
"""Requests of the run that does not count."""

PACKAGES = ("tpserve", "torch", "transformers")

WORKLOADS: dict[str, Callable[[int, int, int], Workload]] = {
    "mixed": lambda requests, seed, vocab: workload.mixed(requests, seed),
    "stream": lambda requests, seed, vocab: Workload(workload.fixed(requests, 100, seed, vocab), [256] * requests),
    "fixed": lambda requests, seed, vocab: Workload(workload.fixed(requests, 128, seed, vocab), [64] * requests),
    "shared": lambda requests, seed, vocab: workload.shared_prefix(requests, 8, 512, 32, 16, seed, vocab),
}
"""By name: from a number of requests, a seed and the largest id."""

LONGEST = {"mixed": (1024, 1024), "stream": (100, 256), "fixed": (128, 64), "shared": (512 + 32, 16)}
"""Tokens of the longest prompt and output that there may be, by name."""


class Plan(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        model: a folder, a .gguf file or a hub id; empty: the embedded default model. In a report also ``--shape NAME``.
            An arm with a setting ``model`` has that one.
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
        first_seconds: the same for one token of each of as many prompts, other ones; for what takes a step, where all
            prompts and outputs are equally long, and all requests run at once.
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
        made_of: what was chosen: the parts, the dtype and the like.
        start_seconds: until its engine was ready.
        runs: in the order of the repeats.
        tokens_per_second: the median of the runs.
    """

    settings: dict[str, Any]
    made_of: dict[str, str]
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
    plan: Plan,
    arms: Mapping[str, Mapping[str, Any]],
    note: Callable[[str, int, Run], None] = lambda *_: None,
    report: Path | None = None,
) -> Report:
    """Run a workload on each arm, in turn.

    Args:
        plan: what to measure.
        arms: settings by name; the first is what the others are held against.
        note: called after each run with the arm, the repeat (-1: the warm-up) and the run.
        report: where the caller will write what comes out; nothing else is written there.

    Raises:
        UserError: a setting is wrong, an engine cannot be started, or the workload does not fit into it.
    """
    # A mistake in the last arm need not wait until the others are loaded.
    configs = {
        name: load_settings({"model": plan.model, **settings}, [], None, os.environ, label=str)
        for name, settings in arms.items()
    }
    check_apart(
        [
            ("the report", report),
            *(file for name, config in configs.items() for file in outputs(config, f"arm {name}'s ")),
        ],
        [file for name, config in configs.items() for file in inputs(config, f"arm {name}'s ")],
    )
    engine_plans = {name: plan_engine(config) for name, config in configs.items()}
    largest = min(LARGEST, *(each.model.vocab_size - 1 for each in engine_plans.values()))
    for name, each in engine_plans.items():
        _check_fit(plan, name, _room(each))

    order = Random(plan.seed)
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    with ExitStack() as engines:
        llms, starts = {}, {}
        for name, settings in arms.items():
            begun = time.monotonic()
            llms[name] = engines.enter_context(LLM(**{"model": plan.model, **settings}))
            starts[name] = time.monotonic() - begun
            _check_fit(plan, name, llms[name].limits)
        for repeat in range(-1, plan.repeats):
            work = _work(plan, repeat, largest)
            for name in order.sample(list(arms), len(arms)):
                run = _run(llms[name], work)
                steps = engine_plans[name].composition.step_tokens
                if plan.workload == "fixed" and _is_at_once(work, llms[name].limits, steps):
                    run = _with_steps(run, _run(llms[name], _first_tokens(plan, repeat, largest)), work.outputs[0])
                note(name, repeat, run)
                if repeat >= 0:
                    runs[name].append(run)
    speeds = {name: [run.tokens_per_second for run in each] for name, each in runs.items()}
    first = next(iter(arms))
    return Report(
        about=about(PACKAGES),
        plan=plan,
        arms={
            name: Arm(
                settings=dict(arms[name]),
                made_of={what: which for what, which, _ in describe(engine_plans[name])},
                start_seconds=starts[name],
                runs=runs[name],
                tokens_per_second=median(speeds[name]),
            )
            for name in arms
        },
        ratios={name: _ratio(speeds[first], speeds[name], plan.seed) for name in arms if name != first},
    )


def _room(engine: EnginePlan) -> EngineLimits:
    """What an engine will have at most: how large a pool is that no setting gives is known when it has been loaded."""
    config, model = engine.config, engine.model
    return EngineLimits(
        pages=-(-config.kv_tokens // config.page_size) or MOST_PAGES,
        page_size=config.page_size,
        slots=config.max_running_requests,
        max_context=min(config.max_context or model.max_context, model.max_context),
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
    )


def _check_fit(plan: Plan, arm: str, limits: EngineLimits) -> None:
    """See that an engine can take the longest prompt with its output."""
    prompt, output = LONGEST[plan.workload]
    try:
        fit([0] * prompt, output, limits, "prompt")
    except RequestError as error:
        raise ConfigError(
            f"workload {plan.workload} does not fit into arm {arm}: {error.message}",
            "Raise max_context or kv_tokens, or take another workload or model",
        ) from None


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


def _work(plan: Plan, repeat: int, largest: int) -> Workload:
    return WORKLOADS[plan.workload](_requests(plan, repeat), _seed(plan, repeat), largest)


def _requests(plan: Plan, repeat: int) -> int:
    return plan.requests if repeat >= 0 else min(plan.requests, WARM_UP)


def _seed(plan: Plan, repeat: int) -> int:
    """Another for each repeat; the first that counts has the plan's own."""
    return plan.seed + (repeat if repeat >= 0 else plan.repeats)


def _first_tokens(plan: Plan, repeat: int, largest: int) -> Workload:
    """One token of each of as many prompts, which share no prefix with those of any repeat."""
    work = WORKLOADS[plan.workload](_requests(plan, repeat), _seed(plan, repeat) + APART, largest)
    return Workload(work.prompts, [1] * len(work.prompts))


def _is_at_once(work: Workload, limits: EngineLimits, step_tokens: int) -> bool:
    """Whether no request waits until others have ended."""
    lengths = [len(prompt) + output for prompt, output in zip(work.prompts, work.outputs, strict=True)]
    pages = sum(-(-length // limits.page_size) for length in lengths)
    return len(lengths) <= min(limits.slots, step_tokens) and pages <= limits.pages


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
