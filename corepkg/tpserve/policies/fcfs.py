"""The policy ``fcfs``: first come, first served."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from tpserve.api.policy import Plan, Policy, Prefill, QueueView

__all__ = ["FcfsPolicy"]


class FcfsPolicy(Policy):
    """Whole prompts in order of arrival, in one batch with all that decodes.

    A prompt waits while pages, rows or the step's tokens are short, and nobody overtakes it; so everyone's turn comes.
    A prompt for which the step has room only without the decoding requests goes before them.
    """

    def plan(self, view: QueueView) -> Plan:
        """Take prompts as long as they fit."""
        room = view.limits.tokens - view.num_decoding
        prefill: list[Prefill] = []
        for prompt in _prompts(view):
            if prompt.tokens > room:
                return Plan((prompt,), decode=False) if not prefill else Plan(tuple(prefill))
            prefill.append(prompt)
            room -= prompt.tokens
        return Plan(tuple(prefill))


def _prompts(view: QueueView) -> Iterator[Prefill]:
    """What could be computed if a step had no end: prompts that were begun, then those that can be admitted."""
    return chain(_begun(view), _admissible(view))


def _begun(view: QueueView) -> Iterator[Prefill]:
    if view.num_decoding < view.num_running:
        for request in view.running():
            if request.pending:
                yield Prefill(request.uid, request.pending)


def _admissible(view: QueueView) -> Iterator[Prefill]:
    limits = view.limits
    rows = limits.running - view.num_running
    pages = limits.free_pages
    for request in view.waiting():
        rows -= 1
        pages -= limits.pages(request.reserve)
        if rows < 0 or pages < 0:
            return
        yield Prefill(request.uid, request.tokens)
