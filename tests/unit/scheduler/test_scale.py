"""A round costs what runs, not what waits: counted in lines of Python executed, which no clock or neighbour changes."""

import sys

import pytest
from tests.unit.scheduler.served import request

from tpserve.messages import Shutdown
from tpserve.plugins.registry import Registry
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.replies import NullReplies
from tpserve.scheduler.round import Round, RoundSource
from tpserve.scheduler.scheduler import Budget, Scheduler
from tpserve.step import EngineLimits
from tpserve.testing.traffic import NoEngine

RUNNING = 4
OUTPUT = 400
SETTLED = 50
COUNTED = 20


class Counting(RoundSource):
    """Lets some requests run and many wait, and then counts the lines that each round executes."""

    def __init__(self, waiting: int, levels: int) -> None:
        self.lines = [0] * COUNTED
        self._waiting = [request(100 + n, max_tokens=OUTPUT, priority=n % levels) for n in range(waiting)]
        self._round = -1

    def receive(self, block: bool) -> Round:
        sys.settrace(None)
        self._round += 1
        if self._round == 0:
            return Round(0, [request(uid, max_tokens=OUTPUT, priority=1000) for uid in range(RUNNING)])
        if self._round == 1:
            return Round(1, self._waiting)
        if SETTLED <= self._round < SETTLED + COUNTED:
            sys.settrace(self._trace)
        return Round(self._round, [Shutdown()] if self._round == SETTLED + COUNTED else [])

    def close(self) -> None: ...

    def _trace(self, frame, event, argument):
        self.lines[self._round - SETTLED] += 1
        return self._trace


def lines(policy: str, rows: int, waiting: int, levels: int) -> int:
    """The most lines that a round of steady decoding executes, where pages are for those alone that run."""
    pages = RUNNING * (-(-(3 + OUTPUT) // 4))
    limits = EngineLimits(pages, page_size=4, slots=rows, max_context=1000, vocab_size=50, eos_ids=())
    plugin = Registry.discover().load("policy", policy)
    options = {"reserve": 1.0} if "reserve" in plugin.spec.options.__struct_fields__ else {}
    source = Counting(waiting, levels)
    budget = Budget(running=rows, step_tokens=512)
    Scheduler(
        source, NullReplies(), NoEngine(limits), plugin.factory()(plugin.make_options(options)), DecisionLog(0), budget
    ).run()
    assert min(source.lines) > 100
    return max(source.lines)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("free", [0, 3])
def test_a_round_does_not_look_at_all_that_waits(policy, free):
    few = lines(policy, RUNNING + free, waiting=100, levels=5)
    many = lines(policy, RUNNING + free, waiting=4000, levels=5)
    assert many <= few + 50
