import random

import pytest
from msgspec.structs import replace

from tpserve.api import PolicySpec
from tpserve.plugins.builtin import tpserve_policies
from tpserve.policies.options import PriorityOptions
from tpserve.policies.priority import PriorityPolicy
from tpserve.testing.policy import PolicyContract
from tpserve.testing.queues import CountingView


class TestPriority(PolicyContract):
    @pytest.fixture
    def spec(self) -> PolicySpec:
        return next(spec for spec in tpserve_policies() if spec.name == "priority")


def order(state, **options) -> list[int]:
    return [prefill.uid for prefill in PriorityPolicy(PriorityOptions(**options)).plan(CountingView(state)).prefill]


def test_the_highest_priority_first_and_then_by_arrival(state, waits):
    waiting = [waits(1), waits(2, priority=-1), waits(3, priority=5), waits(4), waits(5, priority=5)]
    assert order(state(waiting)) == [3, 5, 1, 4, 2]


def test_waiting_makes_up_for_priority(state, waits):
    waiting = [waits(1, since=79), waits(2, since=100, priority=2), waits(3, since=100, priority=3)]
    assert order(state(waiting, now=100), ageing=10) == [3, 1, 2]
    assert order(state(waiting, now=100), ageing=7) == [1, 3, 2]


def test_of_a_long_queue_the_first_of_each_priority_are_read(state, waits, runs, limits):
    waiting = [waits(uid, 60, priority=uid % 3) for uid in range(3000)]
    view = CountingView(state(waiting, [runs(1)]))
    PriorityPolicy(PriorityOptions()).plan(view)
    assert view.reads <= 6


def test_priorities_that_no_wait_makes_up_for_are_not_read(state, waits, runs, limits):
    waiting = [waits(uid, 60, priority=uid % 201, since=uid % 60) for uid in range(2010)]
    view = CountingView(state(waiting, [runs(1)], limits))
    PriorityPolicy(PriorityOptions(ageing=20)).plan(view)
    assert view.reads <= 10
    assert view.looks <= 3


@pytest.mark.parametrize("ageing", [1, 3, 50])
def test_of_many_priorities_the_order_is_that_of_all_sorted(state, waits, limits, ageing):
    draw = random.Random(ageing)
    since = sorted(draw.randrange(100) for _ in range(200))
    waiting = [waits(uid, 1, priority=draw.randrange(-9, 9), since=began) for uid, began in enumerate(since)]
    limits = replace(limits, tokens=200, running=200, free_pages=200)
    wanted = sorted(waiting, key=lambda each: (each.since - ageing * each.priority, each.arrival))
    assert order(state(waiting, limits=limits), ageing=ageing) == [each.uid for each in wanted]


def test_the_least_urgent_gives_its_pages_up_and_goes_on_last(state, runs, limits):
    policy = PriorityPolicy(PriorityOptions(ageing=10))
    running = [
        runs(1, pending=5),
        runs(2, pending=5, priority=1, since=9),
        runs(3, pending=5, priority=1, since=11),
        runs(4, pending=5, priority=9, since=20),
    ]
    ordered = sorted(running, key=policy.retraction_order)
    assert [each.uid for each in ordered] == [4, 2, 1, 3]
    made = policy.plan(CountingView(state(running=running, limits=replace(limits, tokens=15))))
    assert [prefill.uid for prefill in made.prefill] == [4, 2, 1]
