"""Whose turn it is: a leader is held to what its policy promises, round by round."""

from __future__ import annotations

from collections.abc import Callable

from tpserve.policies.filling import TURN
from tpserve.policies.options import BatchingOptions, LpmOptions, PriorityOptions
from tpserve.scheduler.queues import NO_SLOT, Queues, Request
from tpserve.testing.sim.clients import Failure
from tpserve.testing.sim.scenario import Scenario

__all__ = ["Fairness"]

SLACK = 20
"""Rounds that anyone may stand still: for the last token of one who is about to give pages back, for all rows."""


class Fairness:
    """Looks at a leader's queues after each round.

    The policy puts all requests in an order. *Admission*: nobody is admitted while one waits who comes before it; with
    ``lpm``, one who has waited so much longer that no cached prefix makes up for it. *Retraction*: whoever gives its
    pages up comes behind all who keep theirs. *Progress*: whoever comes first of all gets on, within a number of rounds
    that no traffic makes larger; while it waits, within such a number of rounds in which nobody else is admitted. So it
    ends, another comes first, and everyone's turn comes.

    Args:
        scenario: says which policy.

    Attributes:
        retractions: how often pages were given up.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.retractions = 0
        options, budget, limits = scenario.options, scenario.budget, scenario.limits
        assert isinstance(options, BatchingOptions)
        self._order, self._lead = _promise(options, limits.max_context)
        turns = {"mixed": 0, "prefill": TURN, "decode": limits.max_context}
        self._patience = SLACK + turns[options.order]
        rows = min(budget.running, budget.step_tokens, limits.slots)
        self._patience_waiting = SLACK + 2 * rows * limits.max_context
        self._ran: dict[int, Request] = {}
        self._first: Request | None = None
        self._length = 0
        self._rounds = 0

    def check(self, queues: Queues) -> None:
        """Look at them after a round.

        Raises:
            Failure: a promise was broken.
        """
        admitted = [each for uid, each in queues.running.items() if uid not in self._ran]
        retracted = [each for uid, each in self._ran.items() if uid not in queues.running and not each.has_ended]
        if admitted:
            self._check_admission(admitted, queues)
        if retracted:
            self.retractions += len(retracted)
            self._check_retraction(retracted, queues)
        self._check_progress(queues, has_admitted=bool(admitted))
        self._ran = queues.running.copy()

    def _check_admission(self, admitted: list[Request], queues: Queues) -> None:
        ahead = min(queues.waiting(), key=self._order, default=None)
        last = max(admitted, key=self._order)
        if ahead is None:
            return
        place, arrival = self._order(last)
        if (place - self._lead, arrival) > self._order(ahead):
            raise Failure(f"request {last.uid} is admitted while {ahead.uid} waits, which comes before it")

    def _check_retraction(self, retracted: list[Request], queues: Queues) -> None:
        behind = max(queues.running.values(), key=self._order, default=None)
        first = min(retracted, key=self._order)
        if behind and self._order(behind) > self._order(first):
            raise Failure(f"request {first.uid} gives its pages up and {behind.uid} does not, which comes behind it")

    def _check_progress(self, queues: Queues, *, has_admitted: bool) -> None:
        first = min(queues, key=self._order, default=None)
        if first is None:
            return
        waits = first.slot == NO_SLOT
        if first is not self._first or first.length > self._length or (waits and has_admitted):
            self._first, self._length, self._rounds = first, first.length, 0
            return
        self._rounds += 1
        most = self._patience_waiting if waits else self._patience
        if self._rounds > most:
            raise Failure(f"request {first.uid} comes first and stands still for {self._rounds} rounds")


def _promise(options: BatchingOptions, context: int) -> tuple[Callable[[Request], tuple[int, int]], int]:
    """The order of all requests, and how far behind in it one may be who is admitted first all the same."""
    match options:
        case LpmOptions(ageing=ageing):
            return (lambda request: (request.since, request.arrival)), context // ageing + 1
        case PriorityOptions(ageing=ageing):
            return (lambda request: (request.since - request.priority * ageing, request.arrival)), 0
        case _:
            return (lambda request: (request.arrival, 0)), 0
