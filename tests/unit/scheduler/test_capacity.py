"""Running requests get rows and pages, share what they compute, and give everything back."""

import pytest
from tests.unit.scheduler.sample import make

from tpserve.scheduler.capacity import Capacity
from tpserve.scheduler.queues import NO_SLOT
from tpserve.testing.fake_engine import SMALL_LIMITS


@pytest.fixture
def capacity() -> Capacity:
    return Capacity(SMALL_LIMITS, cache=True)


def test_an_admitted_request_holds_a_row_and_pages_for_all_that_is_known(capacity):
    request = make(1, prompt=9, max_tokens=8, outputs=1)
    capacity.admit(request)
    assert (request.slot, request.known, request.length, request.pending) == (0, 10, 0, 10)
    assert request.holding.pages == [0, 1, 2]
    assert capacity.promised == 1
    assert capacity.available == SMALL_LIMITS.pages - 3
    capacity.check([request])
    capacity.release(request)
    assert (request.slot, request.known, request.length, request.holding) == (NO_SLOT, 0, 0, None)
    assert (capacity.promised, capacity.available) == (0, SMALL_LIMITS.pages)
    capacity.check([])


def test_what_was_computed_is_found_by_the_next_and_stays_after_the_end(capacity):
    first, second = make(1, prompt=9), make(2, prompt=12)
    assert capacity.peek(second) == (0, 3)
    capacity.admit(first)
    first.length = 9
    capacity.share(first)
    assert capacity.peek(second) == (8, 1)
    capacity.release(first)
    assert capacity.peek(second) == (8, 3)
    capacity.admit(second)
    assert (second.length, second.pending, second.holding.shared) == (8, 4, 2)
    assert capacity.available == SMALL_LIMITS.pages - 3
    capacity.check([second])


def test_without_a_cache_nothing_is_found():
    capacity, request = Capacity(SMALL_LIMITS, cache=False), make(1, prompt=9)
    capacity.admit(request)
    request.length = 9
    capacity.share(request)
    assert capacity.peek(make(2, prompt=12)) == (0, 3)
    capacity.check([request])


def test_a_peek_is_repeated_only_if_the_cache_has_changed(capacity, monkeypatch):
    calls, peek = [], capacity.pool.peek
    monkeypatch.setattr(capacity.pool, "peek", lambda ids: calls.append(ids) or peek(ids))
    request, other = make(1, prompt=9), make(2, prompt=9)
    capacity.peek(request)
    capacity.peek(request)
    assert len(calls) == 1
    capacity.admit(other)
    capacity.peek(request)
    assert len(calls) == 2
    other.length = 8
    capacity.grow(other)
    capacity.peek(request)
    assert len(calls) == 2
    capacity.share(other)
    assert capacity.peek(request) == (8, 1)


def test_a_request_grows_page_by_page(capacity):
    request = make(1, prompt=4, max_tokens=9)
    capacity.admit(request)
    assert capacity.promised == 2
    assert request.room == 4
    assert capacity.grow(request) == 1
    assert capacity.promised == 1
    assert request.room == 8
    capacity.check([request])


def test_who_is_behind_catches_up(capacity):
    first, second = make(1, prompt=9), make(2, prompt=9)
    capacity.admit(first)
    capacity.admit(second)
    first.length = 8
    second.length = 3
    capacity.share(first)
    assert capacity.catch_up(second) == range(2)
    assert (second.length, second.pending) == (8, 1)
    assert second.holding.pages == [0, 1, 5]
    assert not capacity.catch_up(second)
    assert second.length == 8
    capacity.check([first, second])


def test_the_check_finds_promises_that_do_not_add_up(capacity):
    request = make(1)
    capacity.admit(request)
    capacity.check_counts([request])
    capacity.promised += 1
    with pytest.raises(AssertionError, match="2 pages promised, 1 expected"):
        capacity.check([request])


def test_the_checks_find_what_was_not_given_back(capacity):
    request = make(1)
    capacity.admit(request)
    with pytest.raises(AssertionError, match="63 pages free, 0 cached, 0 held"):
        capacity.check_counts([])
    capacity.pool.release(request.holding, b"")
    with pytest.raises(AssertionError, match="a slot is lost"):
        capacity.check([])
