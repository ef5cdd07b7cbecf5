"""What a policy sees of the queues, and which plans are refused."""

from unittest.mock import ANY

import numpy as np
import pytest
from tests.unit.scheduler.sample import make

from tpserve.api import Glimpse, Limits, Plan, Prefill, RunningRequest, WaitingRequest
from tpserve.scheduler.capacity import Capacity
from tpserve.scheduler.queues import Queues
from tpserve.scheduler.view import View, breach, malformed
from tpserve.testing.fake_engine import SMALL_LIMITS

LIMITS = Limits(tokens=10, chunk=8, running=4, free_pages=5, promised_pages=0)


class Rank:
    """Queues and pages, with requests put where a test wants them."""

    def __init__(self) -> None:
        self.queues = Queues()
        self.capacity = Capacity(SMALL_LIMITS, cache=True)

    def wait(self, *requests):
        for request in requests:
            self.queues.enqueue(request)

    def admit(self, request, length):
        """Let a waiting request compute its first ``length`` positions; it decodes if that is all."""
        self.capacity.admit(request)
        self.queues.admit(request)
        request.length = length
        self.capacity.share(request)
        if not request.pending:
            self.queues.decoding[request.uid] = request

    def view(self) -> View:
        return View(self.queues, self.capacity, LIMITS, 12)

    def breach(self, *prefill, decode=True, **limits):
        fields = {name: getattr(LIMITS, name) for name in Limits.__struct_fields__}
        return breach(Plan(prefill, decode), self.queues, self.capacity, Limits(**{**fields, **limits}))


@pytest.fixture
def rank() -> Rank:
    """Two wait, of 10 and 3 tokens; one has 5 of 10 to go, one decodes."""
    rank, requests = Rank(), [make(uid, prompt) for uid, prompt in enumerate([10, 10, 3, 3])]
    rank.wait(*requests)
    rank.admit(requests[3], 3)
    rank.admit(requests[1], 5)
    return rank


def test_the_view_shows_what_a_policy_needs(rank):
    view = rank.view()
    assert (view.round, view.limits) == (12, LIMITS)
    assert (view.num_waiting, view.num_running, view.num_decoding) == (2, 2, 1)
    assert list(view.waiting()) == [
        WaitingRequest(uid=0, arrival=100, since=7, priority=0, cached=4, tokens=6, pages=2, promised=1),
        WaitingRequest(uid=2, arrival=102, since=7, priority=0, cached=0, tokens=3, pages=1, promised=1),
    ]
    assert list(view.running()) == [
        RunningRequest(uid=1, arrival=101, priority=0, length=5, pending=5, since=7),
        RunningRequest(uid=3, arrival=103, priority=0, length=3, pending=0, since=7),
    ]


def test_priorities_are_seen_apart():
    rank = Rank()
    rank.wait(make(1, priority=2), make(2), make(3, priority=2))
    view = rank.view()
    assert [level.priority for level in view.levels] == [2, 0]
    assert [request.uid for request in view.waiting(2)] == [1, 3]
    assert next(view.waiting(0)).priority == 0


def test_the_waiting_are_looked_up_one_by_one(rank, monkeypatch):
    seen, peek = [], rank.capacity.peek
    monkeypatch.setattr(rank.capacity, "peek", lambda request: seen.append(request.uid) or peek(request))
    assert next(rank.view().waiting()).uid == 0
    assert seen == [0]


def test_a_glimpse_looks_nothing_up_and_shows_what_was_found_last(rank):
    view, version = rank.view(), rank.capacity.pool.version
    assert list(view.glimpses()) == [Glimpse(0, 100, 7, 0, cached=0, seen=-1), Glimpse(2, 102, 7, 0, cached=0, seen=-1)]
    assert view.look(0) == next(view.waiting())
    other = rank.queues.running[1]
    other.length = 8
    rank.capacity.share(other)
    assert rank.capacity.pool.version > version
    assert [(each.uid, each.cached, each.seen) for each in view.glimpses()] == [(0, 4, version), (2, 0, -1)]
    assert [each.uid for each in view.glimpses(0)] == [0, 2]
    assert [*view.glimpses(5)] == []


@pytest.mark.parametrize("uid", [1, 9])
def test_only_who_waits_can_be_looked_up(rank, uid):
    with pytest.raises(KeyError):
        rank.view().look(uid)


def test_cached_pages_that_nobody_holds_are_taken_from_what_is_free(rank):
    waiting = rank.queues.get(0)
    assert rank.capacity.peek(waiting) == (4, 2)
    running = rank.queues.running[1]
    rank.capacity.release(running)
    rank.queues.remove(running)
    assert rank.capacity.peek(waiting) == (4, 3)


@pytest.mark.parametrize(
    "plan",
    [
        (Prefill(0, 6),),
        (Prefill(0, 1), Prefill(1, 5), Prefill(2, 3)),
        (Prefill(1, 5),),
        (),
    ],
)
def test_good_plans_pass(rank, plan):
    assert rank.breach(*plan) is None


@pytest.mark.parametrize(
    ("plan", "limits", "found"),
    [
        ([Prefill(9, 1)], {}, ("living requests", "request 9")),
        ([Prefill(0, 1), Prefill(0, 1)], {}, ("each request once", "request 0 twice")),
        ([Prefill(1, 1), Prefill(1, 1)], {}, ("each request once", "request 1 twice")),
        ([Prefill(0, 7)], {}, ("1 to 6 tokens of request 0", "7")),
        ([Prefill(1, 6)], {}, ("1 to 5 tokens of request 1", "6")),
        ([Prefill(3, 1)], {}, ("1 to 0 tokens of request 3", "1")),
        ([Prefill(0, 5)], {"chunk": 4}, ("1 to 4 tokens of request 0", "5")),
        ([Prefill(0, 0)], {}, ("1 to 6 tokens of request 0", "0")),
        ([Prefill(0, 1), Prefill(2, 1)], {"running": 3}, ("at most 3 running requests", "4")),
        ([Prefill(0, 1), Prefill(2, 1)], {"free_pages": 2}, ("at most 2 pages", "3")),
        ([Prefill(0, 6), Prefill(1, 4)], {}, ("at most 10 tokens", "11")),
    ],
)
def test_plans_that_cannot_be_carried_out_are_refused(rank, plan, limits, found):
    assert rank.breach(*plan, **limits) == found


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (None, ("a Plan", "None")),
        (Plan([Prefill(0, 6)]), ("a tuple of prefills", "[Prefill(uid=0, tokens=6)]")),
        (Plan(iter([Prefill(0, 6)])), ("a tuple of prefills", ANY)),
        (Plan(((0, 6),)), ("prefills of two integers", "(0, 6)")),
        (Plan((Prefill(0, 6.0),)), ("prefills of two integers", "Prefill(uid=0, tokens=6.0)")),
        (Plan((Prefill(np.int64(0), 6),)), ("prefills of two integers", ANY)),
        (Plan((Prefill(0, 6),), 1), ("decode to be True or False", "1")),
    ],
)
def test_what_is_no_plan_is_refused(plan, found):
    assert malformed(plan) == found


def test_nothing_may_be_computed_only_where_a_last_token_is_awaited(rank):
    assert rank.breach(decode=False) == ("something to compute for 4 requests", "nothing")
    del rank.queues.decoding[3]
    assert rank.breach(decode=False) is None
