"""The policy ``fcfs``: first come, first served."""

from __future__ import annotations

from tpserve.api.policy import Plan, Policy, QueueView
from tpserve.policies.filling import fill
from tpserve.policies.options import BatchingOptions

__all__ = ["FcfsPolicy"]


class FcfsPolicy(Policy):
    """In order of arrival: nobody is overtaken, so everyone's turn comes."""

    options: BatchingOptions

    def plan(self, view: QueueView) -> Plan:
        """Take whoever came first."""
        return fill(view, view.waiting(), self.options, self.retraction_order)
