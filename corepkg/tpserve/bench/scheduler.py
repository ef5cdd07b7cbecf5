"""What a round costs on the host: the scheduler over an engine that computes nothing, in steady decoding.

    python -m tpserve.bench.scheduler --running 64,256 --waiting 0,10000 --policy fcfs,lpm

prints JSON: microseconds from the round's messages to the next call for messages, at several quantiles.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from tpserve.bench.host import about
from tpserve.messages import Generate, RankMessage, SamplingParams, Shutdown, StepOutput, encode
from tpserve.plugins.registry import Registry
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.replies import LocalReplies
from tpserve.scheduler.round import Round, RoundSource
from tpserve.scheduler.scheduler import Budget, Scheduler
from tpserve.step import EngineLimits
from tpserve.testing.traffic import NoEngine
from tpserve.tokens import pack_ids

__all__ = ["main", "measure"]

PROMPT = 512
OUTPUT = 4096
PAGE_SIZE = 16
QUANTILES = (0.5, 0.9, 0.99)
SETTLING = 20
"""Rounds of decoding that do not count."""


def main(
    running: Annotated[str, typer.Option(metavar="N,…", help="Requests that decode.")] = "64,256",
    waiting: Annotated[str, typer.Option(metavar="N,…", help="Requests that wait.")] = "0,10000",
    policy: Annotated[str, typer.Option(metavar="NAME,…", help="Policies.")] = "fcfs,lpm,priority",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, of each.")] = 1000,
    overlap: Annotated[bool, typer.Option(help="Decide a round while the one before is computed.")] = True,
) -> None:
    """Measure the scheduler's part of a round; print JSON."""
    results = [
        measure(name, int(ran), int(waited), rounds, overlap)
        for name, ran, waited in itertools.product(policy.split(","), running.split(","), waiting.split(","))
    ]
    report = {"about": about(("tpserve",)), "unit": "microseconds", "results": results}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")


def measure(policy: str, running: int, waiting: int, rounds: int, overlap: bool) -> dict[str, Any]:
    """Time ``rounds`` rounds of decoding with so many requests running, and waiting behind them."""
    plugin = Registry.discover().load("policy", policy)
    made = plugin.factory()(plugin.make_options({}))
    source = _Steady(running, waiting, rounds)
    budget = Budget(running=running, step_tokens=8192, overlap=overlap)
    Scheduler(source, LocalReplies(_write), NoEngine(_limits(running)), made, DecisionLog(0), budget).run()
    times = np.array(source.times) * 1e6
    quantiles = {f"p{100 * share:g}": round(float(np.quantile(times, share)), 1) for share in QUANTILES}
    return {"policy": policy, "running": running, "waiting": waiting, **quantiles}


class _Steady(RoundSource):
    """Fills the rows, then the queue, and then takes the time."""

    def __init__(self, running: int, waiting: int, rounds: int) -> None:
        self.times: list[float] = []
        self._requests = running + waiting
        self._settled = -(-running * PROMPT // 8192) + SETTLING
        self._last = self._settled + rounds
        self._round = -1
        self._given = 0.0

    def receive(self, block: bool) -> Round:
        if self._round > self._settled:
            self.times.append(time.perf_counter() - self._given)
        self._round += 1
        messages: list[RankMessage] = []
        if self._round == 0:
            messages += [_request(uid) for uid in range(self._requests)]
        if self._round > self._last:
            messages.append(Shutdown())
        self._given = time.perf_counter()
        return Round(self._round, messages)

    def close(self) -> None: ...


def _limits(running: int) -> EngineLimits:
    """Room for all that run, to their end."""
    pages = running * (PROMPT + OUTPUT) // PAGE_SIZE
    return EngineLimits(pages, PAGE_SIZE, running, PROMPT + OUTPUT, vocab_size=100, eos_ids=())


def _write(output: StepOutput) -> None:
    """What a leader does with its replies, but for sending them."""
    encode(output)


def _request(uid: int) -> Generate:
    prompt = pack_ids([uid % 100, uid // 100 % 100, uid // 10_000, *[uid % 97] * (PROMPT - 3)])
    params = SamplingParams(max_tokens=OUTPUT, seed=uid, ignore_eos=True)
    return Generate(uid, prompt, params, priority=uid % 3)


if __name__ == "__main__":
    typer.run(main)
