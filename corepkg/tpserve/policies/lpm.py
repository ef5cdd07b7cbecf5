"""The policy ``lpm``: the longest cached prefix first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from operator import attrgetter

from tpserve.api.policy import Glimpse, Plan, Policy, QueueView, WaitingRequest
from tpserve.policies.filling import fill
from tpserve.policies.options import LpmOptions

__all__ = ["LOOKS", "LpmPolicy"]

LOOKS = 16
"""So many of those that are compared are looked up in the prefix cache in one round."""


class LpmPolicy(Policy):
    """Whoever finds most of its tokens cached, so that what is cached is used before it has to go.

    Each round of waiting counts as some cached tokens. So whoever begins to wait ``context / ageing`` rounds after
    another, or later, never overtakes it, and nobody is overtaken for ever.

    Only those that wait longest are compared, so a long queue costs no more than a short one. And however much the
    cache changes, a round looks up no more than LOOKS of them, besides those that it admits and one that does not fit:
    those that were looked up longest ago. The others are compared by what was found then, at most ``window / LOOKS``
    such rounds ago, rounded up.
    """

    options: LpmOptions

    def plan(self, view: QueueView) -> Plan:
        """Take whoever has most cached."""
        return fill(view, self._by_merit(view), self.options, self.retraction_order)

    def _by_merit(self, view: QueueView) -> Iterator[WaitingRequest]:
        ageing = self.options.ageing
        oldest = sorted(islice(view.glimpses(), self.options.window), key=attrgetter("seen"))
        compared: Iterator[Glimpse | WaitingRequest] = chain(
            (view.look(each.uid) for each in oldest[:LOOKS]), oldest[LOOKS:]
        )
        order = sorted((ageing * each.since - each.cached, each.arrival, each.uid) for each in compared)
        for _, _, uid in order:
            yield view.look(uid)
        yield from islice(view.waiting(), len(order), None)
