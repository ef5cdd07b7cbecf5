"""Bugs to plant into the scheduler, each of a kind that someone will write one day."""

import sys
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tpserve.api import Plan, Prefill
from tpserve.envelope import WORDS, Opener
from tpserve.kv.allocator import PageAllocator, SlotAllocator
from tpserve.kv.pool import KvPool
from tpserve.kv.radix import RadixTree
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.policies.filling import fill
from tpserve.policies.lpm import LpmPolicy
from tpserve.policies.priority import PriorityPolicy
from tpserve.scheduler.batch import Batch
from tpserve.scheduler.capacity import Capacity
from tpserve.scheduler.digest import DecisionLog, RoundDecisions
from tpserve.scheduler.queues import Queues, Tombstones
from tpserve.scheduler.round import Caps, FollowerSource, LeaderSource
from tpserve.scheduler.scheduler import Scheduler

__all__ = ["BUGS", "plant"]

BUGS: dict[str, tuple[int, Callable]] = {}
"""Each with the number of seeds within which it must be found, and how to plant it."""


def bug(cls: type, name: str, seeds: int):
    """A function that stands for a method; it gets the method that is right first."""

    def add(wrong: Callable) -> Callable:
        right = getattr(cls, name)

        def plant(patch: pytest.MonkeyPatch) -> None:
            patch.setattr(cls, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))

        BUGS[wrong.__name__] = seeds, plant
        return wrong

    return add


def plant(name: str, patch: pytest.MonkeyPatch) -> int:
    """Plant a bug; the number of seeds within which it must be found."""
    seeds, put = BUGS[name]
    put(patch)
    return seeds


@bug(Batch, "decode", 10)
def a_batch_in_the_order_of_a_set(right, self, requests):
    right(self, list(set(requests)))


@bug(PageAllocator, "free", 5)
def a_page_freed_twice(right, self, pages):
    right(self, pages + pages[:1])


@bug(Batch, "give", 5)
def a_page_written_one_too_far(right, self, request, start, pages):
    right(self, request, start + (start > 0), pages)


@bug(Capacity, "pages", 5)
def one_page_too_few(right, self, tokens):
    return right(self, tokens - 1)


@bug(Scheduler, "_abort", 40)
def an_abort_dropped_in_the_middle_of_a_prompt(right, self, uid, batch):
    request = self.queues.get(uid)
    if request is None or not request.pending:
        right(self, uid, batch)


@bug(Tombstones, "take", 40)
def an_abort_forgotten_that_came_first(right, self, uid):
    return right(self, uid) and False


POLICIES = FcfsPolicy, LpmPolicy, PriorityPolicy


def in_each_policy(seeds):
    """As bug, of the method plan of each policy, as one bug each."""

    def add(wrong: Callable) -> Callable:
        for policy in POLICIES:
            bug(policy, "plan", seeds)(wrong)
            BUGS[f"{wrong.__name__}_in_{policy.__name__}"] = BUGS.pop(wrong.__name__)
        return wrong

    return add


@in_each_policy(80)
def a_clock(right, self, view):
    plan = right(self, view)
    return Plan(plan.prefill[::-1], plan.decode) if time.perf_counter_ns() // 1000 % 3 == 0 else plan


class Hiding:
    """A view that hides every third request: those that wait, or prompts that were begun."""

    def __init__(self, view, *hidden):
        self._view = view
        self._hidden = hidden

    def __getattr__(self, name):
        shown = getattr(self._view, name)
        return (lambda *args: (each for each in shown(*args) if each.uid % 3)) if name in self._hidden else shown


def unless_idle(plan, view, other):
    return plan if plan.prefill or (plan.decode and view.num_decoding) else other()


@in_each_policy(20)
def last_come_first_served(right, self, view):
    return fill(view, reversed(list(view.waiting())), self.options, self.retraction_order)


@in_each_policy(20)
def some_are_not_admitted_while_there_are_others(right, self, view):
    return unless_idle(right(self, Hiding(view, "waiting", "glimpses")), view, lambda: right(self, view))


@in_each_policy(60)
def some_prompts_do_not_go_on_while_there_are_others(right, self, view):
    return unless_idle(right(self, Hiding(view, "running")), view, lambda: right(self, view))


@bug(LpmPolicy, "plan", 20)
def the_longest_cached_prefix_first_however_long_others_wait(right, self, view):
    waiting = sorted(view.waiting(), key=lambda each: (-each.cached, each.arrival))
    return fill(view, waiting, self.options, self.retraction_order)


@bug(PriorityPolicy, "plan", 20)
def the_highest_priority_first_however_long_others_wait(right, self, view):
    waiting = sorted(view.waiting(), key=lambda each: (-each.priority, each.arrival))
    return fill(view, waiting, self.options, self.retraction_order)


@bug(PriorityPolicy, "retraction_order", 60)
def the_youngest_gives_its_pages_up_however_urgent(right, self, request):
    return (request.arrival,)


@bug(FcfsPolicy, "retraction_order", 60)
def the_oldest_gives_its_pages_up(right, self, request):
    return (-request.arrival,)


@bug(Capacity, "share", 60)
def pages_shared_before_they_are_computed(right, self, request):
    self.pool.share(request.holding, request.tokens[: request.known].tobytes())


@bug(Capacity, "catch_up", 100)
def a_page_table_that_is_not_told_of_swapped_pages(right, self, request):
    right(self, request)
    return range(0)


@bug(KvPool, "catch_up", 100)
def swapped_pages_that_are_never_freed(right, self, holding, ids, computed):
    swapped = right(self, holding, ids, computed)
    if swapped:
        del self._pages._stack[-len(swapped) :]
    return swapped


@bug(Scheduler, "_ask", 20)
def a_step_of_one_token_too_many(right, self, round, growing):
    self._step_tokens += 1
    plan = right(self, round, growing)
    self._step_tokens -= 1
    return plan


@bug(Scheduler, "_prefill", 20)
def a_chunk_of_one_token_too_many(right, self, prefill, batch):
    right(self, Prefill(prefill.uid, prefill.tokens + 1), batch)


@bug(Scheduler, "_last", 60)
def another_request_retracted_on_one_rank(right, self):
    return min(self.queues.running.values(), key=lambda each: each.arrival) if self._log.rank == 1 else right(self)


@bug(Queues, "retract", 60)
def a_retracted_request_that_is_lost(right, self, request):
    right(self, request)
    self._wait_no_more(request)


@bug(DecisionLog, "fold", 100)
def decisions_that_are_not_folded(right, self, number, decisions):
    right(self, number, RoundDecisions())


@bug(DecisionLog, "expect", 100)
def digests_that_are_not_compared(right, self, number, digest):
    pass


@bug(RadixTree, "unlock", 20)
def a_node_that_stays_locked(right, self, node):
    if node is self.root or node.locks > 1:
        right(self, node)


@bug(RadixTree, "evict", 60)
def evicted_pages_that_stay_in_the_tree(right, self, count):
    leaf = self._oldest()
    pages = leaf.pages.copy()
    evicted = right(self, count)
    leaf.pages = pages
    return evicted


@bug(SlotAllocator, "free", 5)
def a_row_that_is_never_free_again(right, self, slot):
    pass


@bug(Scheduler, "_end", 10)
def an_ended_request_that_gets_the_token_under_way(right, self, request):
    right(self, request)
    request.has_ended = False


@bug(Opener, "open_all", 200)
def frames_that_may_come_in_any_order(right, self, frames):
    payloads = []
    for frame in frames:
        first, sequence, *_ = WORDS.unpack_from(frame)
        self._due[first] = sequence
        payloads += right(self, [frame])
    return payloads


@bug(Scheduler, "_ask", 20)
def one_request_too_many_that_runs(right, self, round, growing):
    most = self._max_running
    self._max_running = min(most + 1, self._limits.slots)
    plan = right(self, round, growing)
    self._max_running = most
    return plan


@bug(LeaderSource, "_take", 20)
def rounds_of_any_number_of_messages(right, self, deadline):
    self._caps = Caps(10**6, self._caps.bytes)
    return right(self, deadline)


@bug(LeaderSource, "_take", 20)
def rounds_of_one_message_too_many(right, self, deadline):
    self._caps = Caps(self._caps.messages + 1, self._caps.bytes)
    frames = right(self, deadline)
    self._caps = Caps(self._caps.messages - 1, self._caps.bytes)
    return frames


@bug(LeaderSource, "_take", 5)
def rounds_of_any_number_of_bytes(right, self, deadline):
    self._caps = Caps(self._caps.messages, 10**9)
    return right(self, deadline)


@bug(Batch, "start", 5)
def cached_tokens_that_are_not_told(right, self, request):
    right(self, request)
    self._started[-1:] = [replace(self._started[-1], cached_tokens=0)] if self._started else []


@bug(KvPool, "release", 5)
def answers_that_are_not_cached(right, self, holding, ids):
    right(self, holding, ids[: holding.shared * self._tree.page_bytes])


@bug(KvPool, "share", 5)
def prompts_that_are_cached_only_in_the_end(right, self, holding, ids):
    if sys._getframe(2).f_code.co_name == "release":
        right(self, holding, ids)


@bug(KvPool, "admit", 5)
def prefixes_that_are_cached_and_not_found(right, self, ids):
    self.counters.looked_up += max(0, len(ids) - self._tree.page_bytes) // 4
    return right(self, ids[: self._tree.page_bytes])


@bug(KvPool, "grow", 5)
def all_evicted_whenever_one_page_is_wanted(right, self, holding, count):
    if count > self._pages.free_count:
        self.counters.evicted += self._tree.evictable
        self._pages.free(self._tree.evict(self._tree.evictable))
    return right(self, holding, count)


@bug(RadixTree, "evict", 5)
def twice_as_much_evicted(right, self, count):
    return right(self, min(2 * count, self.evictable))


@bug(KvPool, "grow", 5)
def evictions_that_are_not_counted(right, self, holding, count):
    counted = self.counters.evicted
    pages = right(self, holding, count)
    self.counters.evicted = counted
    return pages


@bug(Scheduler, "_retract", 40)
def one_request_too_many_retracted(right, self, request, batch):
    right(self, request, batch)
    if len(self.queues.running) > 1:
        right(self, self._last(), batch)


@bug(Scheduler, "_grow", 10)
def a_request_retracted_though_pages_can_be_had(right, self, full, batch):
    if self.capacity.available == 1 and full and not self.queues.has_ending and len(self.queues.running) > 1:
        self._retract(self._last(), batch)
    right(self, [each for each in full if each.uid in self.queues.decoding], batch)


@bug(LpmPolicy, "plan", 60)
def lpm_that_does_not_look_at_the_cache(right, self, view):
    return fill(view, view.waiting(), self.options, self.retraction_order)


@bug(FollowerSource, "_check", 40)
def announcements_that_are_not_checked(right, self, announcement):
    pass
