"""How steps are filled: in order, within limits, nobody overtaken, nothing read that is not needed."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpserve.api import Limits, Plan, Prefill, RunningRequest, WaitingRequest
from tpserve.policies.filling import TURN, fill
from tpserve.policies.options import BatchingOptions
from tpserve.testing.queues import CountingView, QueueState, fault

replace = msgspec.structs.replace


def by_arrival(request: RunningRequest) -> tuple[int, ...]:
    return (request.arrival,)


def plan(state: QueueState, **options) -> Plan:
    view = CountingView(state)
    return fill(view, view.waiting(), BatchingOptions(**options), by_arrival)


def test_prompts_in_order_beside_all_that_decode(state, waits, runs):
    assert plan(state([waits(5, 30), waits(6, 30)], [runs(1)])) == Plan((Prefill(5, 30), Prefill(6, 30)))


def test_nothing_to_do_but_decode(state, runs):
    for order in ("mixed", "prefill", "decode"):
        assert plan(state(running=[runs(1), runs(2)]), order=order) == Plan()


def test_prompts_alone_where_they_go_first(state, waits, runs):
    assert plan(state([waits(5, 99)], [runs(1)]), order="prefill") == Plan((Prefill(5, 99),), decode=False)


def test_where_prompts_go_first_what_decodes_has_its_turn_all_the_same(state, waits, runs):
    waiting, running = [waits(uid, 1) for uid in range(5, 9)], [runs(1), runs(2, pending=3)]
    made = [plan(state(waiting, running, now=now), order="prefill") for now in range(100, 100 + TURN)]
    assert made.count(Plan()) == 1
    assert plan(state(waiting, running[1:], now=TURN), order="prefill").prefill


def test_prompts_that_were_begun_go_on_in_the_order_that_is_given(state, runs):
    running = state(running=[runs(1, pending=9), runs(2, pending=8), runs(3)])
    made = fill(CountingView(running), [], BatchingOptions(), lambda request: (-request.arrival,))
    assert made == Plan((Prefill(2, 8), Prefill(1, 9)))


def test_prompts_wait_for_all_that_decodes_where_that_goes_first(state, waits, runs):
    assert plan(state([waits(5)], [runs(1), runs(2, pending=3)]), order="decode") == Plan()
    begun = plan(state([waits(5)], [runs(2, pending=3)]), order="decode")
    assert begun == Plan((Prefill(2, 3), Prefill(5, 10)), decode=False)


@pytest.mark.parametrize(("change", "limit"), [("free_pages", 9), ("running", 2)])
def test_a_prompt_that_does_not_fit_is_not_overtaken(state, waits, runs, limits, change, limit):
    waiting = [waits(5, 30), waits(6, 30), waits(7, 1)]
    assert plan(state(waiting, [runs(1)], replace(limits, **{change: limit}))) == Plan((Prefill(5, 30),))


def test_a_prompt_fills_what_is_left_of_the_step(state, waits, runs, limits):
    waiting = [waits(5, 30), waits(6, 60), waits(7, 1)]
    assert plan(state(waiting, [runs(1)], replace(limits, tokens=71))) == Plan((Prefill(5, 30), Prefill(6, 40)))


def test_a_prompt_goes_in_chunks(state, waits, runs, limits):
    waiting, running = [waits(5, 30)], [runs(1), runs(2, pending=9)]
    assert plan(state(waiting, running, replace(limits, chunk=7))) == Plan((Prefill(2, 7), Prefill(5, 7)))


def test_no_prompt_where_decoding_takes_the_whole_step(state, waits, runs, limits):
    running = [runs(1), runs(2), runs(3, pending=5)]
    assert plan(state([waits(5)], running, replace(limits, tokens=2))) == Plan()


def test_a_share_of_what_was_promised_is_kept_back(state, waits, runs, limits):
    tight = replace(limits, free_pages=10, promised_pages=8)
    one = [waits(5, 8, promised=8)]  # leaves 8 pages, of 16 promised ones
    assert plan(state(one, [runs(1)], tight), reserve=0.5) == Plan((Prefill(5, 8),))
    assert plan(state(one, [runs(1)], tight), reserve=0.6) == Plan()
    assert plan(state(one, [runs(1)], tight), reserve=0.0) == Plan((Prefill(5, 8),))


def test_where_nothing_runs_one_is_admitted_whatever_it_may_take(state, waits, limits):
    waiting = [waits(5, 8, promised=100), waits(6, 8, promised=100)]
    assert plan(state(waiting, limits=limits), reserve=1.0) == Plan((Prefill(5, 8),))


def test_a_long_queue_is_not_scanned(state, waits, runs):
    waiting = [waits(uid, 60) for uid in range(10_000)]
    view = CountingView(state(waiting, [runs(1)]))
    assert fill(view, view.waiting(), BatchingOptions(), by_arrival) == Plan((Prefill(0, 60), Prefill(1, 39)))
    assert view.reads == 2


def test_nobody_is_looked_at_where_no_row_is_free(state, waits, runs):
    view = CountingView(state([waits(5)], [runs(uid) for uid in range(7)], finishing=1))
    assert fill(view, view.waiting(), BatchingOptions(), by_arrival) == Plan()
    assert view.reads == 0


waiting_requests = st.lists(st.tuples(st.integers(1, 150), st.integers(0, 30)), max_size=12)


@settings(deadline=None)
@given(
    waiting_requests,
    st.lists(st.integers(0, 3), max_size=8),
    st.integers(0, 80),
    st.sampled_from(["mixed", "prefill", "decode"]),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_plans_keep_to_the_limits_and_take_a_prefix_of_the_queue(waiting, running, free_pages, order, reserve):
    state = QueueState(
        0,
        Limits(tokens=100, chunk=64, running=8, free_pages=free_pages + 200 * (not running), promised_pages=7),
        [
            WaitingRequest(uid, uid, 0, 0, 0, tokens, -(-tokens // 4), more)
            for uid, (tokens, more) in enumerate(waiting)
        ],
        [RunningRequest(1000 + row, row, 0, 10, pending) for row, pending in enumerate(running)],
    )
    made = plan(state, order=order, reserve=reserve)
    assert made == plan(state, order=order, reserve=reserve)
    admitted = [prefill.uid for prefill in made.prefill if prefill.uid < 1000]
    assert admitted == list(range(len(admitted)))
    if waiting or running:
        assert fault(made, state) is None
