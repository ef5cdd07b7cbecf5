"""Policies that break the contract, each in one way."""

from __future__ import annotations

import os
import random
import time
from itertools import islice
from typing import Any

from tpserve.api import Options, Plan, PolicySpec, Prefill, QueueView, RunningRequest, WaitingRequest
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.policies.filling import fill
from tpserve.policies.options import BatchingOptions


def spec_of(policy: str) -> PolicySpec:
    return PolicySpec(name="bad", summary="bad", factory=f"bad_policies:{policy}", options=BatchingOptions)


class Clock(FcfsPolicy):
    """Decodes alone in every other microsecond."""

    def plan(self, view: QueueView) -> Plan:
        made = super().plan(view)
        return Plan() if view.num_decoding and time.monotonic_ns() // 1000 % 2 else made


class WallClock(FcfsPolicy):
    """Decodes alone in every other stretch of a million seconds."""

    def plan(self, view: QueueView) -> Plan:
        made = super().plan(view)
        return Plan() if view.num_decoding and time.clock_gettime(time.CLOCK_REALTIME) // 1e6 % 2 else made


class SetOrder(FcfsPolicy):
    """Puts the batch in the order of a set of texts."""

    def plan(self, view: QueueView) -> Plan:
        made = super().plan(view)
        by_name = {str(prefill.uid): prefill for prefill in made.prefill}
        return Plan(tuple(by_name[name] for name in set(by_name)), made.decode)


class OverBudget(FcfsPolicy):
    """Takes whatever waits."""

    def plan(self, view: QueueView) -> Plan:
        return Plan(tuple(Prefill(request.uid, request.tokens) for request in view.waiting()))


class Idle(FcfsPolicy):
    """Does nothing while more than one request waits."""

    def plan(self, view: QueueView) -> Plan:
        return Plan(decode=False) if view.num_waiting > 1 else super().plan(view)


class Twice(FcfsPolicy):
    """Computes a prompt twice."""

    def plan(self, view: QueueView) -> Plan:
        made = super().plan(view)
        return Plan(made.prefill * 2, made.decode)


class Starving(FcfsPolicy):
    """The shortest prompt first, whatever came earlier."""

    def plan(self, view: QueueView) -> Plan:
        limits = view.limits
        room, rows, pages = limits.tokens - view.num_decoding, limits.running - view.num_running, limits.free_pages
        taken: list[Prefill] = []
        for request in sorted(view.waiting(), key=lambda request: (request.tokens, request.arrival)):
            room, rows, pages = room - request.tokens, rows - 1, pages - request.pages - request.promised
            if min(room, rows, pages) < 0:
                break
            taken.append(Prefill(request.uid, request.tokens))
        return Plan(tuple(taken)) if taken or view.num_running else super().plan(view)


class Stateful(FcfsPolicy):
    """Takes one prompt less in every third step."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._calls = 0

    def plan(self, view: QueueView) -> Plan:
        self._calls += 1
        made = super().plan(view)
        return Plan(made.prefill[1:]) if self._calls % 3 == 0 and view.num_decoding else made


class Writing(FcfsPolicy):
    """Notes what it has seen in the view."""

    def plan(self, view: Any) -> Plan:
        view.seen = True
        return super().plan(view)


class Thorough(FcfsPolicy):
    """Reads the whole queue."""

    def plan(self, view: QueueView) -> Plan:
        assert sum(1 for _ in view.waiting()) == view.num_waiting
        return super().plan(view)


class LastFirst(FcfsPolicy):
    """Last come, first served."""

    def plan(self, view: QueueView) -> Plan:
        return fill(view, reversed(list(view.waiting())), self.options, self.retraction_order)


class CachedFirst(FcfsPolicy):
    """The longest cached prefix first, however long others wait."""

    def plan(self, view: QueueView) -> Plan:
        waiting = sorted(view.waiting(), key=lambda request: (-request.cached, request.arrival))
        return fill(view, waiting, self.options, self.retraction_order)


class UrgentFirst(FcfsPolicy):
    """The highest priority first, however long others wait."""

    def plan(self, view: QueueView) -> Plan:
        waiting = sorted(view.waiting(), key=lambda request: (-request.priority, request.arrival))
        return fill(view, waiting, self.options, self.retraction_order)


class NeverTheMeek(FcfsPolicy):
    """Admits nobody of a priority below 0 while anyone else is there."""

    def plan(self, view: QueueView) -> Plan:
        waiting = [request for request in view.waiting() if request.priority >= 0]
        return (
            fill(view, waiting, self.options, self.retraction_order) if _is_busy(waiting, view) else super().plan(view)
        )


class NeverTheLowest(FcfsPolicy):
    """Admits nobody of a priority below -50 while anyone else is there."""

    def plan(self, view: QueueView) -> Plan:
        waiting = [request for request in view.waiting() if request.priority >= -50]
        return (
            fill(view, waiting, self.options, self.retraction_order) if _is_busy(waiting, view) else super().plan(view)
        )


class NeverTheLong(FcfsPolicy):
    """Admits no prompt above 260 tokens while anyone else is there."""

    most = 260

    def plan(self, view: QueueView) -> Plan:
        waiting = [request for request in view.waiting() if request.cached + request.tokens <= self.most]
        return (
            fill(view, waiting, self.options, self.retraction_order) if _is_busy(waiting, view) else super().plan(view)
        )


class NeverTheHuge(NeverTheLong):
    """Admits no prompt above 5000 tokens while anyone else is there."""

    most = 5000


def _is_busy(waiting: list[WaitingRequest], view: QueueView) -> bool:
    return bool(waiting) or view.num_running > 0


class PromptsFirst(FcfsPolicy):
    """Decodes when there are no prompts."""

    def plan(self, view: QueueView) -> Plan:
        made = super().plan(view)
        return Plan(made.prefill, decode=not made.prefill)


class LongestLast(FcfsPolicy):
    """Lets go first who has come least far."""

    def retraction_order(self, request: RunningRequest) -> tuple[int, ...]:
        return -request.length, request.arrival


class LeastUrgentLast(FcfsPolicy):
    """Does not say who of two equally urgent ones goes first."""

    def retraction_order(self, request: RunningRequest) -> tuple[int, ...]:
        return (-request.priority,)


class Hashed(FcfsPolicy):
    """Lets go whoever's name has the largest hash."""

    def retraction_order(self, request: RunningRequest) -> tuple[int, ...]:
        return (hash(str(request.uid)),)


class Ageing(FcfsPolicy):
    """Orders those that wait, as long as nobody has waited long; as the template does, whose order is sound."""

    def plan(self, view: QueueView) -> Plan:
        waiting = list(islice(view.waiting(), 32))
        if waiting and view.round - waiting[0].since < 64:
            waiting.sort(key=self.precedence)
        return fill(view, waiting, self.options, self.retraction_order)

    def precedence(self, request: WaitingRequest) -> tuple[float, ...]:
        return request.tokens, request.arrival


class ByMinute(Ageing):
    """The shortest first in even minutes."""

    def precedence(self, request: WaitingRequest) -> tuple[float, ...]:
        return request.tokens if int(time.time() / 60) % 2 else -request.tokens, request.arrival


class TiesByHash(Ageing):
    """Of those that are equally long, who has the luckier name."""

    def precedence(self, request: WaitingRequest) -> tuple[float, ...]:
        return request.tokens, hash(str(request.uid)) % 2


class ByProcess(Ageing):
    """The shortest first in a process with an odd number."""

    def precedence(self, request: WaitingRequest) -> tuple[float, ...]:
        return (request.tokens if os.getpid() % 2 else -request.tokens,)


class ByLot(Ageing):
    """Of those that are equally long, whose lot it is."""

    def precedence(self, request: WaitingRequest) -> tuple[float, ...]:
        return request.tokens, random.random()
