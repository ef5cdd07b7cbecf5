"""The contract of the ``policy`` kind as tests: subclass :class:`PolicyContract` and give it your spec.

class TestMine(PolicyContract):
    @pytest.fixture
    def spec(self):
        return plugin.tpserve_policies()[0]
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from tpserve.api import Options, Policy, PolicySpec
from tpserve.messages import MAX_PRIORITY
from tpserve.testing.decisions import decide, decided_elsewhere, make, see_the_same
from tpserve.testing.queues import CountingView, QueueState, fault, long_queue, random_state
from tpserve.testing.traffic import CONTEXT, LARGE_CONTEXT, Ask, rounds_until_finished

__all__ = ["PolicyContract"]

STATES = 300

TRAFFIC: dict[str, Callable[[random.Random], Ask]] = {
    "short": lambda draw: Ask(draw.randint(1, 8), draw.randint(1, 8)),
    "long": lambda draw: Ask(draw.randint(90, 150), draw.randint(1, 4)),
    "talkative": lambda draw: Ask(draw.randint(1, 8), draw.randint(50, 150)),
    "brief": lambda draw: Ask(draw.randint(1, 8), 1),
    "mixed": lambda draw: Ask(draw.choice([3, 30, 95, 200]), draw.choice([1, 10, 100])),
    "cached": lambda draw: Ask(draw.randint(60, 90), draw.randint(1, 8), shared=56),
    "urgent": lambda draw: Ask(draw.randint(1, 30), draw.randint(1, 30), priority=draw.choice([1, 3, 5])),
    "varied": lambda draw: Ask(draw.randint(1, 400), draw.randint(1, 60), priority=draw.randint(-5, 5)),
}
"""The requests that keep coming."""


def _draw_victim(draw: random.Random) -> Ask:
    prompt = draw.randint(1, CONTEXT - 1)
    return Ask(prompt, draw.randint(1, min(100, CONTEXT - prompt)), priority=draw.randint(-2, 2))


VICTIMS = [
    *(Ask(1, 1), Ask(20, 20, priority=-1), Ask(99, 2, priority=1), Ask(250, 30)),
    *(Ask(CONTEXT - 1, 1), Ask(LARGE_CONTEXT - 1, 1)),
    *(_draw_victim(random.Random(number)) for number in range(2)),
]
"""Whose turn has to come: the ends of the range of what may be asked for, and some within."""

SLOW_VICTIMS = [Ask(20, 20, priority=-MAX_PRIORITY), Ask(1, CONTEXT - 1)]
"""And whose turn may come late."""


def _name(victim: Ask) -> str:
    return f"{victim.prompt}+{victim.output}@{victim.priority}"


class PolicyContract:
    """Subclass it, with the fixture ``spec``.

    Attributes:
        rounds: within so many rounds every request is finished, whatever else keeps coming.
        rounds_at_last: and within so many one of the lowest priority of all, or with the longest answer.
        reads: so many of a long queue's requests may be read in one round.
    """

    rounds: ClassVar[int] = 3000
    rounds_at_last: ClassVar[int] = 15_000
    reads: ClassVar[int] = 1000

    @pytest.fixture
    def spec(self) -> PolicySpec:
        """The spec of the policy under test."""
        raise NotImplementedError("give your policy's spec in a fixture of this name")

    @pytest.fixture
    def options(self, spec: PolicySpec) -> Options:
        """The options to test with; override it to try others."""
        return spec.options()

    @pytest.fixture
    def states(self) -> list[QueueState]:
        """What to decide about."""
        draw = random.Random(7)
        return [random_state(draw) for _ in range(STATES)]

    def test_plans_keep_to_the_limits(self, spec: PolicySpec, options: Options, states: list[QueueState]) -> None:
        """Of tokens, rows and pages; and something is computed whenever something is there."""
        policy = make(spec, options)
        for state in states:
            broken = fault(policy.plan(CountingView(state)), state)
            assert broken is None, f"the policy {broken}: {state}"

    def test_nothing_is_kept_between_calls(self, spec: PolicySpec, options: Options, states: list[QueueState]) -> None:
        """What is decided depends on what is shown alone: not on what was decided before, nor how often."""
        policy = make(spec, options)
        fresh = [decide(make(spec, options), state) for state in states]
        again = [decide(policy, state) for state in states]
        backwards = [decide(policy, state) for state in reversed(states)]
        for found in (again, backwards[::-1]):
            see_the_same(fresh, found, "a new policy", "one that has decided before")

    def test_the_view_is_only_read(self, spec: PolicySpec, options: Options, states: list[QueueState]) -> None:
        """Neither it nor the requests that it shows are changed."""
        policy = make(spec, options)
        for state in states:
            before = msgspec.json.encode(state)
            decide(policy, state)
            assert msgspec.json.encode(state) == before

    @pytest.mark.parametrize(("hash_seed", "clock"), [(0, 0.0), (1, 1e6 + 1.37), (4321, -1e8 - 4321.71)])
    def test_another_process_decides_alike(
        self, spec: PolicySpec, options: Options, states: list[QueueState], hash_seed: int, clock: float
    ) -> None:
        """One whose sets have another order, whose clock shows another time, and which has another id."""
        here = [decide(make(spec, options), state) for state in states]
        there = decided_elsewhere(spec, options, states, hash_seed, clock)
        see_the_same(here, there, "this process", "another process")

    def test_who_gives_pages_up_is_settled(self, spec: PolicySpec, options: Options, states: list[QueueState]) -> None:
        """Of any two requests it is the same one, however far they have come: so some request always goes on."""
        policy = make(spec, options)
        for state in states:
            order = [policy.retraction_order(request) for request in state.running]
            assert len({*order}) == len(order), f"the policy gives two requests the same place: {order}"
            grown = [replace(request, length=request.length + 100, pending=0) for request in state.running]
            assert [policy.retraction_order(request) for request in grown] == order, "their places change as they go on"

    @pytest.mark.parametrize("victim", VICTIMS, ids=_name)
    @pytest.mark.parametrize("traffic", TRAFFIC)
    def test_nobody_waits_for_ever(self, spec: PolicySpec, options: Options, traffic: str, victim: Ask) -> None:
        """A request of any size and sign is finished after a bounded number of rounds, while others keep coming."""
        _finishes(make(spec, options), traffic, victim, self.rounds)

    @pytest.mark.parametrize("victim", SLOW_VICTIMS, ids=_name)
    @pytest.mark.parametrize("traffic", ["short", "urgent", "varied"])
    def test_not_even_the_last_waits_for_ever(
        self, spec: PolicySpec, options: Options, traffic: str, victim: Ask
    ) -> None:
        """Neither does one of the lowest priority that a client can ask for, or with the longest answer."""
        _finishes(make(spec, options), traffic, victim, self.rounds_at_last)

    def test_a_long_queue_is_not_read_to_its_end(self, spec: PolicySpec, options: Options) -> None:
        """What is not read costs nothing."""
        view = CountingView(long_queue(10_000))
        make(spec, options).plan(view)
        assert view.reads <= self.reads, f"read {view.reads} of 10000 waiting requests"


def _finishes(policy: Policy, traffic: str, victim: Ask, most: int) -> None:
    draw = random.Random(1)
    waited = rounds_until_finished(policy, lambda: TRAFFIC[traffic](draw), victim, most)
    assert waited is not None, f"{victim} is not finished after {most} rounds"
