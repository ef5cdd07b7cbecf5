"""Filling a step: what the built-in policies share. They differ in whom they would take next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from tpserve.api.policy import Plan, Prefill, QueueView, RunningRequest, WaitingRequest
from tpserve.policies.options import BatchingOptions

__all__ = ["TURN", "fill"]

TURN = 16
"""Where prompts go first, one round of so many decodes all the same: nobody's answer stands still."""


def fill(
    view: QueueView,
    waiting: Iterable[WaitingRequest],
    options: BatchingOptions,
    order: Callable[[RunningRequest], tuple[int, ...]],
) -> Plan:
    """Plan a step.

    Args:
        view: of the queues.
        waiting: whom to admit, in this order; nobody overtakes one who does not fit. Read no further than needed.
        options: how to fill steps.
        order: in which prompts that were begun go on, the smallest first.
    """
    if view.num_decoding and _decodes_alone(view, options):
        return Plan()
    prefill = tuple(_prompts(view, waiting, options, order))
    return Plan(prefill, decode=options.order == "mixed" or not prefill)


def _decodes_alone(view: QueueView, options: BatchingOptions) -> bool:
    return options.order == "decode" or (options.order == "prefill" and view.round % TURN == 0)


def _prompts(
    view: QueueView,
    waiting: Iterable[WaitingRequest],
    options: BatchingOptions,
    order: Callable[[RunningRequest], tuple[int, ...]],
) -> Iterator[Prefill]:
    """Prompts that were begun and then others, until the step has no room for more."""
    room = view.limits.tokens - (view.num_decoding if options.order == "mixed" else 0)
    if not room:
        return
    for uid, tokens in chain(_begun(view, order), _admissible(view, waiting, options.reserve)):
        taken = min(tokens, view.limits.chunk, room)
        yield Prefill(uid, taken)
        room -= taken
        if not room:
            return


def _begun(view: QueueView, order: Callable[[RunningRequest], tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    if view.num_decoding < view.num_running:
        for request in sorted((each for each in view.running() if each.pending), key=order):
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
