"""The policy contract fails whatever breaks it, each breach by the test that is meant for it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tpserve.api import Plan, Prefill
from tpserve.messages import Generate, SamplingParams
from tpserve.plugins.builtin import tpserve_policies
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.policies.options import BatchingOptions
from tpserve.scheduler.queues import Queues, Request
from tpserve.scheduler.view import breach
from tpserve.testing.decisions import Decided, see_the_same
from tpserve.testing.fake_engine import SMALL_LIMITS
from tpserve.testing.policy import SLOW_VICTIMS, VICTIMS, PolicyContract
from tpserve.testing.queues import CountingView, QueueState, fault, random_state
from tpserve.testing.traffic import CONTEXT, Ask
from tpserve.tokens import pack_ids


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of bad policies, where child processes find it too."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import bad_policies

    return bad_policies


class Quick(PolicyContract):
    """The contract, sooner at an end with those who let wait."""

    rounds_at_last = 3000


STATES = [random_state(random.Random(seed)) for seed in range(300)]
MEEK = next(victim for victim in VICTIMS if victim.priority < 0)
LONGEST = next(victim for victim in VICTIMS if victim.prompt == CONTEXT - 1)
HUGEST = max(VICTIMS, key=lambda victim: victim.prompt)
OTHERS = [{"hash_seed": 1, "clock": 1e6 + 1.37}, {"hash_seed": 4321, "clock": -1e8 - 4321.71}]
SHORT_TRAFFIC = {"traffic": "short", "victim": Ask(99, 2)}


@pytest.mark.parametrize(
    ("policy", "test", "arguments"),
    [
        ("Clock", "test_another_process_decides_alike", {"states": STATES, "hash_seed": 0, "clock": 1e6 + 1.37}),
        ("WallClock", "test_another_process_decides_alike", {"states": STATES, "hash_seed": 0, "clock": 1e6 + 1.37}),
        ("SetOrder", "test_another_process_decides_alike", {"states": STATES, "hash_seed": 1, "clock": 0.0}),
        ("OverBudget", "test_plans_keep_to_the_limits", {"states": STATES}),
        ("Idle", "test_plans_keep_to_the_limits", {"states": STATES}),
        ("Twice", "test_plans_keep_to_the_limits", {"states": STATES}),
        ("Starving", "test_nobody_waits_for_ever", SHORT_TRAFFIC),
        ("LastFirst", "test_nobody_waits_for_ever", SHORT_TRAFFIC),
        ("CachedFirst", "test_nobody_waits_for_ever", {"traffic": "cached", "victim": Ask(99, 2)}),
        ("UrgentFirst", "test_nobody_waits_for_ever", {"traffic": "urgent", "victim": Ask(20, 20)}),
        ("PromptsFirst", "test_nobody_waits_for_ever", {"traffic": "brief", "victim": Ask(20, 20)}),
        ("NeverTheMeek", "test_nobody_waits_for_ever", {"traffic": "short", "victim": MEEK}),
        ("NeverTheLowest", "test_not_even_the_last_waits_for_ever", {"traffic": "short", "victim": SLOW_VICTIMS[0]}),
        ("NeverTheLong", "test_nobody_waits_for_ever", {"traffic": "short", "victim": LONGEST}),
        ("NeverTheHuge", "test_nobody_waits_for_ever", {"traffic": "short", "victim": HUGEST}),
        ("LongestLast", "test_who_gives_pages_up_is_settled", {"states": STATES}),
        ("LeastUrgentLast", "test_who_gives_pages_up_is_settled", {"states": STATES}),
        ("Hashed", "test_another_process_decides_alike", {"states": STATES, "hash_seed": 1, "clock": 0.0}),
        *(("ByMinute", "test_another_process_decides_alike", {"states": STATES, **other}) for other in OTHERS),
        *(("TiesByHash", "test_another_process_decides_alike", {"states": STATES, **other}) for other in OTHERS[:1]),
        *(("ByProcess", "test_another_process_decides_alike", {"states": STATES, **other}) for other in OTHERS[:1]),
        *(("ByLot", "test_another_process_decides_alike", {"states": STATES, **other}) for other in OTHERS[:1]),
        ("Stateful", "test_nothing_is_kept_between_calls", {"states": STATES}),
        ("Writing", "test_the_view_is_only_read", {"states": STATES}),
        ("Thorough", "test_a_long_queue_is_not_read_to_its_end", {}),
    ],
)
def test_a_bad_policy_fails(bad: Any, policy: str, test: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Quick(), test)(bad.spec_of(policy), BatchingOptions(), **arguments)
    getattr(Quick(), test)(tpserve_policies()[0], BatchingOptions(), **arguments)


def test_a_difference_is_told_in_words() -> None:
    one = Decided(Plan((Prefill(7, 5), Prefill(8, 5))), [1, 2, 3])
    for other, says in (
        (
            Decided(Plan((Prefill(7, 5),)), [1, 2, 3]),
            "A goes on with 5 tokens of request 8 where B goes on with nothing",
        ),
        (
            Decided(Plan(one.plan.prefill, decode=False), [1, 2, 3]),
            "A lets the others decode where B lets nobody decode",
        ),
        (Decided(one.plan, [1, 3, 2]), r"A has the requests \[2, 3\] give up .* B has the requests \[3, 2\]"),
    ):
        with pytest.raises(pytest.fail.Exception, match=f"A and B decide differently about 1 of 2 queues.*{says}"):
            see_the_same([one, one], [one, other], "A", "B")


CLOCKS = """
import datetime, os, resource, sys, time
from tpserve.testing.decisions import shift_clock
start = datetime.datetime(1970, 1, 1)
NAMES = "time", "monotonic", "perf_counter", "process_time", "thread_time"
def read():
    return {
        **{name: getattr(time, name)() for name in NAMES},
        **{f"{name}_ns": getattr(time, f"{name}_ns")() / 1e9 for name in NAMES},
        "clock_gettime": time.clock_gettime(time.CLOCK_BOOTTIME),
        "clock_gettime_ns": time.clock_gettime_ns(time.CLOCK_REALTIME) / 1e9,
        "localtime": time.mktime(time.localtime()),
        "gmtime": time.mktime(time.gmtime(None)),
        "ctime": time.mktime(time.strptime(time.ctime())),
        "asctime": time.mktime(time.strptime(time.asctime())),
        "strftime": float(time.strftime("%s")),
        "os.times": os.times().elapsed,
        "getrusage": resource.getrusage(resource.RUSAGE_SELF).ru_utime,
        "now": datetime.datetime.now().timestamp(),
        "utcnow": (datetime.datetime.utcnow() - start).total_seconds(),
        "today": datetime.datetime.today().timestamp(),
        "date": (datetime.date.today() - start.date()).total_seconds(),
    }
before, given = read(), time.gmtime(0)
shift_clock(lambda: 1e7)
print({name: now - before[name] for name, now in read().items() if abs(now - before[name] - 1e7) > 86400})
assert time.gmtime(0) == given and time.strftime("%Y", given) == "1970"
"""


def test_every_clock_of_the_standard_library_is_shifted() -> None:
    command = [sys.executable, "-W", "ignore", "-c", CLOCKS]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "TZ": "UTC"})
    assert done.stdout == "{}\n"


def test_a_plan_of_nothing_is_a_breach_while_anything_can_be_computed() -> None:
    kinds = set()
    for state in STATES:
        idle = bool(state.finishing)
        kinds.add((idle, state.decoding > 0))
        found = breach(Plan(decode=False), queues_of(state), Cached(state), state.limits)
        assert (found is None, fault(Plan(decode=False), state) is None) == (idle, idle)
    assert len(kinds) == 4, "the states hold not every kind"


def test_the_kit_and_the_scheduler_find_the_same_faults() -> None:
    draw = random.Random(5)
    found = []
    for state in STATES:
        for plan in plans(draw, state):
            found.append(fault(plan, state) is None)
            assert found[-1] == (breach(plan, queues_of(state), Cached(state), state.limits) is None), (plan, state)
    assert 0.2 < sum(found) / len(found) < 0.8


def plans(draw: random.Random, state: QueueState) -> list[Plan]:
    """A good plan, and variations of it, most of them bad."""
    good = FcfsPolicy(BatchingOptions()).plan(CountingView(state))
    more = [Prefill(request.uid, request.tokens) for request in draw.sample(state.waiting, min(2, len(state.waiting)))]
    less = tuple(Prefill(prefill.uid, draw.randint(0, prefill.tokens)) for prefill in good.prefill)
    return [
        good,
        Plan(good.prefill, decode=not good.decode),
        Plan((*good.prefill, *more), good.decode),
        Plan(tuple(more), decode=False),
        Plan(less, good.decode),
        Plan(good.prefill[1:], good.decode),
        Plan((*good.prefill, Prefill(-1, 1)), good.decode),
    ]


class Cached:
    """What a scheduler's capacity says of those that wait."""

    def __init__(self, state: QueueState) -> None:
        self._waiting = {request.uid: request for request in state.waiting}

    def peek(self, request: Request) -> tuple[int, int]:
        waiting = self._waiting[request.uid]
        return waiting.cached, waiting.pages


def queues_of(state: QueueState) -> Queues:
    """The scheduler's own queues in this state."""
    queues = Queues()
    for waiting in state.waiting:
        queues.enqueue(request_of(waiting.uid, waiting.cached + waiting.tokens, waiting.arrival))
    for running in state.running:
        known = running.length + running.pending if running.pending else running.length
        request = request_of(running.uid, known, running.arrival)
        request.known, request.length = known, running.length
        queues.running[running.uid] = request
        if not running.pending:
            queues.decoding[running.uid] = request
    for number in range(state.finishing):
        queues.running[-2 - number] = request_of(-2 - number, 1, 0)
    return queues


def request_of(uid: int, known: int, arrival: int) -> Request:
    message = Generate(uid, pack_ids([1] * known), SamplingParams(max_tokens=1, seed=0))
    return Request.of(message, arrival, 0, msgspec.structs.replace(SMALL_LIMITS, max_context=1 << 30))


def test_states_cover_what_there_is() -> None:
    assert any(not state.waiting for state in STATES)
    assert any(not state.running for state in STATES)
    assert any(state.finishing for state in STATES)
    assert any(request.pending for state in STATES for request in state.running)
    assert any(request.tokens > state.limits.tokens for state in STATES for request in state.waiting)
    assert any(request.cached for state in STATES for request in state.waiting)
    assert any(request.priority and request.since for state in STATES for request in state.running)
