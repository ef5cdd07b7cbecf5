"""The plans of ``fcfs``: in order, within limits, nobody overtaken, nothing read that is not needed."""

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpserve.api import Limits, NoOptions, Plan, PolicySpec, Prefill, RunningRequest, WaitingRequest
from tpserve.plugins.builtin import tpserve_policies
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.testing.policy import PolicyContract

LIMITS = Limits(tokens=100, running=8, free_pages=50, page_size=4)


class TestFcfs(PolicyContract):
    @pytest.fixture
    def spec(self) -> PolicySpec:
        return tpserve_policies()[0]


class FakeView:
    """A queue view that counts what is read of it."""

    def __init__(
        self, waiting: list[WaitingRequest] = (), running: list[RunningRequest] = (), limits: Limits = LIMITS
    ) -> None:
        self._waiting, self._running, self.limits = list(waiting), list(running), limits
        self.read = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        return sum(not request.pending for request in self._running)

    def waiting(self) -> Iterator[WaitingRequest]:
        return map(self._count, self._waiting)

    def running(self) -> Iterator[RunningRequest]:
        return map(self._count, self._running)

    def _count(self, request):
        self.read += 1
        return request


def waits(uid: int, tokens: int, reserve: int | None = None) -> WaitingRequest:
    return WaitingRequest(uid, uid, tokens, reserve or tokens, priority=0)


def runs(uid: int, pending: int = 0) -> RunningRequest:
    return RunningRequest(uid, uid, length=10, pending=pending, reserve=20, priority=0)


def plan(view: FakeView) -> Plan:
    return FcfsPolicy(NoOptions()).plan(view)


def test_everything_that_fits_is_taken_in_order_beside_the_decoding():
    assert plan(FakeView([waits(5, 30), waits(6, 30)], [runs(1)])) == Plan((Prefill(5, 30), Prefill(6, 30)))


def test_nothing_to_do_but_decode():
    assert plan(FakeView(running=[runs(1), runs(2)])) == Plan()


@pytest.mark.parametrize(
    "limits",
    [
        msgspec.structs.replace(LIMITS, tokens=70),
        msgspec.structs.replace(LIMITS, free_pages=14),
        msgspec.structs.replace(LIMITS, running=2),
    ],
    ids=["tokens", "pages", "rows"],
)
def test_a_prompt_that_does_not_fit_is_not_overtaken(limits):
    view = FakeView([waits(5, 30), waits(6, 60), waits(7, 1)], [runs(1)], limits)
    assert plan(view) == Plan((Prefill(5, 30),))


def test_pages_are_counted_for_all_that_a_request_can_need():
    view = FakeView([waits(5, 4, reserve=17), waits(6, 4)], limits=msgspec.structs.replace(LIMITS, free_pages=5))
    assert plan(view) == Plan((Prefill(5, 4),))


@pytest.mark.parametrize("tokens", [100, 250])
def test_a_prompt_that_fits_only_alone_goes_before_the_decoding(tokens):
    view = FakeView([waits(5, tokens), waits(6, 1)], [runs(1)], msgspec.structs.replace(LIMITS, free_pages=99))
    assert plan(view) == Plan((Prefill(5, tokens),), decode=False)


def test_prompts_that_were_begun_come_first():
    assert plan(FakeView([waits(5, 30)], [runs(1), runs(2, pending=9)])) == Plan((Prefill(2, 9), Prefill(5, 30)))


def test_a_long_queue_is_not_scanned():
    view = FakeView([waits(uid, 60) for uid in range(10_000)], [runs(1)])
    assert plan(view) == Plan((Prefill(0, 60),))
    assert view.read == 2


requests = st.tuples(st.integers(1, 150), st.integers(0, 100))


@given(st.lists(requests, max_size=12), st.lists(st.integers(0, 3), max_size=8), st.integers(0, 80))
def test_plans_keep_to_the_limits_and_take_a_prefix_of_the_queue(waiting, running, free_pages):
    view = FakeView(
        [waits(uid, tokens, tokens + more) for uid, (tokens, more) in enumerate(waiting)],
        [runs(1000 + row, max(0, pending - 1)) for row, pending in enumerate(running)],
        msgspec.structs.replace(LIMITS, free_pages=free_pages),
    )
    made = plan(view)
    assert made == plan(view)
    admitted = [prefill for prefill in made.prefill if prefill.uid < 1000]
    assert [prefill.uid for prefill in admitted] == list(range(len(admitted)))
    assert view.num_running + len(admitted) <= LIMITS.running
    assert sum(LIMITS.pages(view._waiting[prefill.uid].reserve) for prefill in admitted) <= free_pages
    computed = sum(prefill.tokens for prefill in made.prefill) + view.num_decoding * made.decode
    assert computed <= LIMITS.tokens or (len(made.prefill) == 1 and not view.num_decoding * made.decode)
    if view.num_decoding or any(running):
        assert computed
