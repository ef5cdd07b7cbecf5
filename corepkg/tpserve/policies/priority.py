"""The policy ``priority``: the most urgent first."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

from tpserve.api.policy import Plan, Policy, QueueView, WaitingRequest
from tpserve.policies.filling import fill
from tpserve.policies.options import PriorityOptions

__all__ = ["PriorityPolicy"]


class PriorityPolicy(Policy):
    """Whoever's client gave the highest priority; among equals, first come, first served.

    Waiting makes more urgent: nobody is overtaken for ever. Those of one priority have waited in order of arrival, so
    only the first of each have to be compared.
    """

    options: PriorityOptions

    def plan(self, view: QueueView) -> Plan:
        """Take whoever is most urgent."""
        return fill(view, self._by_urgency(view), self.options)

    def _by_urgency(self, view: QueueView) -> Iterator[WaitingRequest]:
        now, ageing = view.round, self.options.ageing

        def order(request: WaitingRequest) -> tuple[int, int]:
            return -request.priority * ageing - (now - request.since), request.arrival

        yield from merge(*[view.waiting(priority) for priority in view.priorities], key=order)
