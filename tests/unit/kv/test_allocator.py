"""Every page and slot is free or held once, whatever is asked in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpserve.kv.allocator import PageAllocator, SlotAllocator


def test_a_fresh_pool_hands_out_pages_in_order():
    pages = PageAllocator(6)
    assert pages.alloc(2) == [0, 1]
    assert pages.alloc(0) == []
    assert pages.alloc(4) == [2, 3, 4, 5]
    assert pages.free_count == 0


def test_pages_freed_last_come_back_first_and_in_the_order_freed():
    pages = PageAllocator(8)
    first, second = pages.alloc(3), pages.alloc(3)
    pages.free(first)
    pages.free(second)
    assert pages.alloc(7) == [3, 4, 5, 0, 1, 2, 6]


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_pages_are_conserved(total, calls):
    pages, held = PageAllocator(total), []
    for allocates, amount in calls:
        if allocates and amount <= pages.free_count:
            held.append(pages.alloc(amount))
            assert len(held[-1]) == amount
        elif not allocates and held:
            pages.free(held.pop(amount % len(held)))
        pages.check(held)
        assert pages.free_count + sum(map(len, held)) == pages.total == total


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_equal_calls_give_equal_pages(calls):
    def trace():
        pages, held, seen = PageAllocator(12), [], []
        for allocates, amount in calls:
            if allocates and amount <= pages.free_count:
                held.append(pages.alloc(amount))
                seen.append(held[-1])
            elif held:
                pages.free(held.pop())
        return seen

    assert trace() == trace()


def test_too_many_pages_are_refused():
    pages = PageAllocator(4)
    pages.alloc(3)
    with pytest.raises(AssertionError, match="2 pages wanted, 1 free"):
        pages.alloc(2)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([[0, 1]], "1 pages are lost, the first is 2"),
        ([[0, 1], [1]], "1 pages are lost, the first is 2"),
        ([[0, 1], [1, 2]], "1 pages too many"),
        ([[0, 1], [2, 3]], "1 pages too many"),
    ],
)
def test_the_check_finds_lost_and_shared_pages(owners, message):
    pages = PageAllocator(4)
    pages.alloc(3)
    with pytest.raises(AssertionError, match=message):
        pages.check(owners)


def test_the_check_finds_a_double_free():
    pages = PageAllocator(4)
    held = pages.alloc(3)
    pages.free(held[:1])
    pages.free(held[:1])
    with pytest.raises(AssertionError, match="1 pages too many"):
        pages.check([held[1:]])


@given(st.lists(st.integers(-1, 7), max_size=50))
def test_the_lowest_free_slot_comes_first(calls):
    slots, held = SlotAllocator(5), []
    for call in calls:
        if call < 0 and slots.free_count:
            slot = slots.alloc()
            assert slot == min(set(range(5)) - set(held))
            held.append(slot)
        elif held and call >= 0:
            slots.free(held.pop(call % len(held)))
        slots.check(held)


def test_slots_are_neither_freed_twice_nor_lost():
    slots = SlotAllocator(2)
    slot = slots.alloc()
    with pytest.raises(AssertionError, match="lost, or owned twice"):
        slots.check([])
    slots.free(slot)
    with pytest.raises(AssertionError, match="slot 0 freed and not held"):
        slots.free(slot)
    slots.alloc(), slots.alloc()
    with pytest.raises(AssertionError, match="none free"):
        slots.alloc()
