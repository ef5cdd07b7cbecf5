import pytest

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
