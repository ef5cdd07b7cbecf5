import pytest
from msgspec.structs import replace

from tpserve.api import PolicySpec
from tpserve.plugins.builtin import tpserve_policies
from tpserve.policies.lpm import LOOKS, LpmPolicy
from tpserve.policies.options import LpmOptions
from tpserve.testing.policy import PolicyContract
from tpserve.testing.queues import CountingView


class TestLpm(PolicyContract):
    @pytest.fixture
    def spec(self) -> PolicySpec:
        return next(spec for spec in tpserve_policies() if spec.name == "lpm")


def order(state, **options) -> list[int]:
    return [prefill.uid for prefill in LpmPolicy(LpmOptions(**options)).plan(CountingView(state)).prefill]


def test_the_longest_cached_prefix_first_and_then_by_arrival(state, waits):
    assert order(state([waits(1), waits(2, cached=16), waits(3, cached=64), waits(4, cached=16)])) == [3, 2, 4, 1]


def test_waiting_makes_up_for_cached_tokens(state, waits):
    waiting = [waits(1, since=92), waits(2, since=100, cached=64), waits(3, since=100, cached=65)]
    assert order(state(waiting, now=100), ageing=8) == [3, 1, 2]
    assert order(state(waiting, now=100), ageing=100) == [1, 3, 2]


def test_behind_the_window_the_rest_comes_by_arrival(state, waits):
    waiting = [waits(1), waits(2, cached=4), waits(3, cached=9), waits(4, cached=99)]
    assert order(state(waiting), window=2) == [2, 1, 3, 4]


class Forgetful(CountingView):
    """Shows glimpses of a cache that was empty, but for those in ``seen``."""

    __slots__ = ("seen",)

    def __init__(self, state, seen=()):
        super().__init__(state)
        object.__setattr__(self, "seen", dict(seen))

    def glimpses(self, priority=None):
        for each in super().glimpses(priority):
            yield replace(each, cached=0, seen=self.seen.get(each.uid, -1))


def test_a_round_looks_up_few_of_those_that_it_compares(state, waits, limits):
    waiting = [waits(uid, 60, cached=uid % 7) for uid in range(1000)]
    view = CountingView(state(waiting, limits=limits))
    made = LpmPolicy(LpmOptions(window=500)).plan(view)
    assert view.looks <= LOOKS + len(made.prefill) + 1


def test_the_others_are_compared_by_what_was_found_when_they_were_last_looked_up(state, waits):
    waiting = [waits(uid, cached=9 if uid in {LOOKS - 1, LOOKS} else 0) for uid in range(2 * LOOKS)]
    policy = LpmPolicy(LpmOptions())
    view = Forgetful(state(waiting))
    assert policy.plan(view).prefill[0].uid == LOOKS - 1
    view = Forgetful(state(waiting), seen=dict.fromkeys(range(LOOKS), 5))
    assert policy.plan(view).prefill[0].uid == LOOKS
