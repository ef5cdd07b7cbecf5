"""The policy ``priority``: the most urgent first."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from tpserve.api.policy import Glimpse, Plan, Policy, QueueView, RunningRequest, WaitingRequest
from tpserve.policies.filling import fill
from tpserve.policies.options import PriorityOptions

__all__ = ["PriorityPolicy"]


class PriorityPolicy(Policy):
    """Whoever's client gave the highest priority; among equals, first come, first served.

    Waiting makes more urgent: whoever begins to wait ``ageing`` rounds after another for each step of priority between
    them, or later, never overtakes it, and nobody is overtaken for ever. All age alike, so who comes before whom never
    changes; prompts that were begun go on in that order, and when the pool runs dry, the last gives its pages up.

    Those of one priority have waited in order of arrival, so only the first of each are compared, and a priority is
    opened when its first is the next of all.
    """

    options: PriorityOptions

    def plan(self, view: QueueView) -> Plan:
        """Take whoever is most urgent."""
        return fill(view, self._by_urgency(view), self.options, self.retraction_order)

    def retraction_order(self, request: RunningRequest) -> tuple[int, ...]:
        """The least urgent first."""
        return self._place(request)

    def _place(self, request: Glimpse | RunningRequest) -> tuple[int, int]:
        """The smaller, the more urgent."""
        return request.since - request.priority * self.options.ageing, request.arrival

    def _by_urgency(self, view: QueueView) -> Iterator[WaitingRequest]:
        ageing = self.options.ageing
        heap: list[_Entry] = [
            (level.since - level.priority * ageing, level.arrival, level.priority, None) for level in view.levels
        ]
        heapify(heap)
        while heap:
            _, _, priority, opened = heappop(heap)
            if opened is None:
                behind = view.glimpses(priority)
                first = next(behind)
            else:
                first, behind = opened
            yield view.look(first.uid)
            following = next(behind, None)
            if following:
                heappush(heap, (*self._place(following), priority, (following, behind)))


_Entry = tuple[int, int, int, tuple[Glimpse, Iterator[Glimpse]] | None]
"""Of a priority: the place of the first that is left, itself, and once it is opened, that one and those behind it."""
