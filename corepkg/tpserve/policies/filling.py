"""Filling a step: what the built-in policies share. They differ in whom they would take next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from tpserve.api.policy import Plan, Prefill, QueueView, WaitingRequest
from tpserve.policies.options import BatchingOptions

__all__ = ["fill"]


def fill(view: QueueView, waiting: Iterable[WaitingRequest], options: BatchingOptions) -> Plan:
    """Plan a step.

    Args:
        view: of the queues.
        waiting: whom to admit, in this order; nobody overtakes one who does not fit. Read no further than needed.
        options: how to fill steps.
    """
    if options.order == "decode" and view.num_decoding:
        return Plan()
    prefill = tuple(_prompts(view, waiting, options))
    return Plan(prefill, decode=options.order == "mixed" or not prefill)


def _prompts(view: QueueView, waiting: Iterable[WaitingRequest], options: BatchingOptions) -> Iterator[Prefill]:
    """Prompts that were begun and then others, until the step has no room for more."""
    room = view.limits.tokens - (view.num_decoding if options.order == "mixed" else 0)
    if not room:
        return
    for uid, tokens in chain(_begun(view), _admissible(view, waiting, options.reserve)):
        taken = min(tokens, view.limits.chunk, room)
        yield Prefill(uid, taken)
        room -= taken
        if not room:
            return


def _begun(view: QueueView) -> Iterator[tuple[int, int]]:
    if view.num_decoding < view.num_running:
        for request in view.running():
            if request.pending:
                yield request.uid, request.pending


def _admissible(view: QueueView, waiting: Iterable[WaitingRequest], reserve: float) -> Iterator[tuple[int, int]]:
    limits = view.limits
    rows, free, promised = limits.running - view.num_running, limits.free_pages, limits.promised_pages
    if not rows:
        return
    is_alone = not view.num_running
    for request in waiting:
        free -= request.pages
        promised += request.promised
        if free < 0 or (free < reserve * promised and not is_alone):
            return
        yield request.uid, request.tokens
        is_alone = False
        rows -= 1
        if not rows:
            return
