"""What a round costs on the host: the scheduler over an engine that computes nothing, in steady decoding.

    python -m tpserve.bench.scheduler --running 64,256 --waiting 0,10000 --policy fcfs,lpm
    python -m tpserve.bench.scheduler --running 256 --policy priority --levels 201 --free 16 --ageing 1
    python -m tpserve.bench.scheduler --running 256 --policy lpm --shared 256 --ending 1

prints JSON: microseconds from the round's messages to the next call for messages, at several quantiles.

Those that wait came some a round, the less urgent first, so with little ageing all priorities compete. There are pages
for those that run, to their end, and for nobody else: where rows are free, the policy looks in each round for somebody
to admit, and nobody fits. Where requests end, as many are admitted, and each round changes the prefix cache.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np
import typer
from msgspec.structs import replace

from tpserve.bench.arguments import run
from tpserve.bench.host import about
from tpserve.bench.transport.cases import read_numbers
from tpserve.messages import Abort, Generate, RankMessage, SamplingParams, Shutdown, StepOutput, encode
from tpserve.plugins.registry import Registry
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.replies import LocalReplies
from tpserve.scheduler.round import Round, RoundSource
from tpserve.scheduler.scheduler import Budget, Scheduler
from tpserve.step import EngineLimits
from tpserve.testing.traffic import NoEngine
from tpserve.tokens import pack_ids

__all__ = ["Case", "main", "measure"]

PROMPT = 512
OUTPUT = 4096
PAGE_SIZE = 16
STEP = 8192
SPARE = 64
"""Pages, fewer than a request takes: those that decode take some in a round in which others are admitted."""
ARRIVALS = 50
"""Requests that come to wait in a round."""
QUANTILES = (0.5, 0.9, 0.99)
SETTLING = 20
"""Rounds of decoding that do not count."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        policy: its name.
        running: requests that decode.
        waiting: requests that wait behind them.
        levels: priorities that these have.
        shared: tokens with which all prompts begin; whole pages.
        free: rows that stay free.
        ending: requests that end in a round.
        ageing: the policy's option of this name, if it has one; 0 for its default.
        overlap: whether a round is decided while the one before is computed.
    """

    policy: str = "fcfs"
    running: int = 256
    waiting: int = 0
    levels: int = 3
    shared: int = 0
    free: int = 0
    ending: int = 0
    ageing: int = 0
    overlap: bool = True


def main(
    running: Annotated[str, typer.Option(metavar="N,…", help="Requests that decode.")] = "64,256",
    waiting: Annotated[str, typer.Option(metavar="N,…", help="Requests that wait.")] = "0,10000",
    policy: Annotated[str, typer.Option(metavar="NAME,…", help="Policies.")] = "fcfs,lpm,priority",
    levels: Annotated[int, typer.Option(min=1, max=201, help="Priorities of those that wait.")] = 3,
    shared: Annotated[int, typer.Option(min=0, max=PROMPT // 2, help="Tokens with which all prompts begin.")] = 0,
    free: Annotated[int, typer.Option(min=0, help="Rows that stay free, for want of pages.")] = 0,
    ending: Annotated[int, typer.Option(min=0, help="Requests that end in a round, for others to follow.")] = 0,
    ageing: Annotated[int, typer.Option(min=0, help="The policies' ageing; 0: their default.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, of each.")] = 1000,
    overlap: Annotated[bool, typer.Option(help="Decide a round while the one before is computed.")] = True,
) -> None:
    """Measure the scheduler's part of a round; print JSON."""
    case = Case(
        levels=levels,
        shared=shared // PAGE_SIZE * PAGE_SIZE,
        free=free,
        ending=ending,
        ageing=ageing,
        overlap=overlap,
    )
    results = []
    sizes = read_numbers(running, "--running"), read_numbers(waiting, "--waiting")
    for name, ran, waited in itertools.product(policy.split(","), *sizes):
        case = replace(case, policy=name, running=ran, waiting=waited)
        results.append(msgspec.to_builtins(case) | measure(case, rounds))
    report = {"about": about(("tpserve",)), "unit": "microseconds", "results": results}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Time ``rounds`` rounds; the quantiles in microseconds, by name."""
    plugin = Registry.discover().load("policy", case.policy)
    wanted = {"reserve": 1.0} | ({"ageing": case.ageing} if case.ageing else {})
    options = {name: value for name, value in wanted.items() if name in plugin.spec.options.__struct_fields__}
    policy = plugin.factory()(plugin.make_options(options))
    source = _Steady(case, rounds)
    budget = Budget(running=case.running + case.free, step_tokens=STEP, overlap=case.overlap)
    Scheduler(source, LocalReplies(source.note), NoEngine(_limits(case)), policy, DecisionLog(0), budget).run()
    times = np.array(source.times) * 1e6
    return {f"p{100 * share:g}": round(float(np.quantile(times, share)), 1) for share in QUANTILES}


class _Steady(RoundSource):
    """Fills the rows, then the queue, and then takes the time."""

    def __init__(self, case: Case, rounds: int) -> None:
        self.times: list[float] = []
        self._case = case
        self._running = [_request(case, uid) for uid in range(case.running)]
        self._waiting = deque(_request(case, case.running + number, number) for number in range(case.waiting))
        self._started: deque[int] = deque()
        self._filled = -(-case.running * PROMPT // STEP)
        self._settled = self._filled + -(-case.waiting // ARRIVALS) + SETTLING
        self._last = self._settled + rounds
        self._round = -1
        self._given = 0.0

    def receive(self, block: bool) -> Round:
        if self._round > self._settled:
            self.times.append(time.perf_counter() - self._given)
        self._round += 1
        messages = list(self._messages())
        self._given = time.perf_counter()
        return Round(self._round, messages)

    def note(self, output: StepOutput) -> None:
        """What a leader does with its replies, but for sending them; and remember who runs."""
        encode(output)
        self._started.extend(started.uid for started in output.started)

    def close(self) -> None: ...

    def _messages(self) -> Iterator[RankMessage]:
        if self._round == 0:
            yield from self._running
        if self._round > self._filled:
            for _ in range(min(ARRIVALS, len(self._waiting))):
                yield self._waiting.popleft()
        if self._round > self._settled:
            for _ in range(min(self._case.ending, len(self._started))):
                yield Abort(self._started.popleft())
        if self._round > self._last:
            yield Shutdown()


def _limits(case: Case) -> EngineLimits:
    """Room for all that run, to their end."""
    shared = case.shared // PAGE_SIZE
    pages = shared + case.running * ((PROMPT + OUTPUT) // PAGE_SIZE - shared) + SPARE
    return EngineLimits(pages, PAGE_SIZE, case.running + case.free, PROMPT + OUTPUT, vocab_size=100, eos_ids=())


def _request(case: Case, uid: int, place: int = 0) -> Generate:
    own = [uid % 100, uid // 100 % 100, uid // 10_000, *[uid % 97] * PROMPT]
    prompt = pack_ids([*[0] * case.shared, *own][:PROMPT])
    params = SamplingParams(max_tokens=OUTPUT, seed=uid, ignore_eos=True)
    return Generate(uid, prompt, params, priority=place * case.levels // max(1, case.waiting) - case.levels // 2)


if __name__ == "__main__":
    run(main)
