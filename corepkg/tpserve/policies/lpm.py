"""The policy ``lpm``: the longest cached prefix first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from tpserve.api.policy import Plan, Policy, QueueView, WaitingRequest
from tpserve.policies.filling import fill
from tpserve.policies.options import LpmOptions

__all__ = ["LpmPolicy"]


class LpmPolicy(Policy):
    """Whoever finds most of its tokens cached, so that what is cached is used before it has to go.

    Only those that wait longest are compared, so a long queue costs no more than a short one. Each round of waiting
    counts as some cached tokens: nobody is overtaken for ever.
    """

    options: LpmOptions

    def plan(self, view: QueueView) -> Plan:
        """Take whoever has most cached."""
        return fill(view, self._by_merit(view), self.options)

    def _by_merit(self, view: QueueView) -> Iterator[WaitingRequest]:
        now, ageing = view.round, self.options.ageing

        def order(request: WaitingRequest) -> tuple[int, int]:
            return -request.cached - ageing * (now - request.since), request.arrival

        waiting = view.waiting()
        yield from sorted(islice(waiting, self.options.window), key=order)
        yield from waiting
