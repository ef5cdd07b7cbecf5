"""The ``policy`` kind: what runs in the next step.

A policy is a pure function from a read-only view to a plan. **The rule**: equal views give equal plans, in
every process and on every machine; so no clock, no randomness, no iteration over a ``set``, no ``id()`` or ``hash()``
of an object, and no state kept between calls. Time is counted in rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from tpserve.api.specs import Options

__all__ = ["Glimpse", "Level", "Limits", "Plan", "Policy", "Prefill", "QueueView", "RunningRequest", "WaitingRequest"]


class Glimpse(msgspec.Struct, frozen=True):
    """A waiting request as far as it is known without a look into the prefix cache.

    Attributes:
        uid: names the request.
        arrival: its place in the message stream; smaller came earlier.
        since: the round in which it began to wait.
        priority: larger is more urgent; 0 unless the client said otherwise.
        cached: how many of its first tokens the prefix cache held when it was last looked up; 0 if it never was.
        seen: when that was, to compare with others: smaller is longer ago, -1 is never.
    """

    uid: int
    arrival: int
    since: int
    priority: int
    cached: int
    seen: int


class Level(msgspec.Struct, frozen=True):
    """Those of one priority that wait.

    Attributes:
        priority: theirs.
        since: the round in which the first of them began to wait.
        arrival: the place of that one in the message stream.
    """

    priority: int
    since: int
    arrival: int


class WaitingRequest(msgspec.Struct, frozen=True):
    """A request that holds no pages.

    Attributes:
        uid: names the request.
        arrival: its place in the message stream; smaller came earlier.
        since: the round in which it began to wait.
        priority: larger is more urgent; 0 unless the client said otherwise.
        cached: how many of its first tokens the prefix cache holds now.
        tokens: tokens to compute behind those: of the prompt, and of the output for a request that goes on.
        pages: free pages that admitting it takes: those for all these tokens, and cached ones that nobody holds now.
        promised: pages that it may come to take after those, until it ends.
    """

    uid: int
    arrival: int
    since: int
    priority: int
    cached: int
    tokens: int
    pages: int
    promised: int


class RunningRequest(msgspec.Struct, frozen=True):
    """A request that holds pages.

    Attributes:
        uid: names the request.
        arrival: its place in the message stream.
        priority: larger is more urgent.
        length: tokens whose keys and values are in the cache.
        pending: known tokens still to compute; 0 when it decodes, or has drawn its last token.
        since: the round in which it began to wait; giving its pages up does not change it.
    """

    uid: int
    arrival: int
    priority: int
    length: int
    pending: int
    since: int = 0


class Limits(msgspec.Struct, frozen=True):
    """What a plan must keep to.

    Attributes:
        tokens: the most tokens that one step may compute.
        chunk: the most tokens of one prompt that one step may compute.
        running: the most requests that may hold pages.
        free_pages: pages for requests that are admitted in this step, after what the decoding ones take in it.
        promised_pages: pages that the running requests may yet come to take. They are not kept back: when the pool runs
            dry, the last by :meth:`Policy.retraction_order` gives its pages up, waits again and is computed anew.
    """

    tokens: int
    chunk: int
    running: int
    free_pages: int
    promised_pages: int


class QueueView(Protocol):
    """What a policy sees. Reading it changes nothing but what later glimpses remember.

    ``waiting`` and ``glimpses`` cost what is read of them: a policy that stops early never pays for the rest of a long
    queue. Each request that ``waiting`` or ``look`` shows is looked up in the prefix cache, which takes as long as its
    prompt is; a policy that compares many reads glimpses, and looks at few.
    """

    @property
    def round(self) -> int:
        """The round that is planned."""

    @property
    def limits(self) -> Limits:
        """What the plan must keep to."""

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""

    @property
    def num_running(self) -> int:
        """How many requests hold pages."""

    @property
    def num_decoding(self) -> int:
        """How many of those decode: a step that decodes computes one token of each."""

    @property
    def levels(self) -> Sequence[Level]:
        """Those that wait by priority, largest first."""

    def waiting(self, priority: int | None = None) -> Iterator[WaitingRequest]:
        """Requests without pages, all or those of one priority, by arrival; lazy."""

    def glimpses(self, priority: int | None = None) -> Iterator[Glimpse]:
        """Requests without pages, as ``waiting`` gives them, without a look into the prefix cache; lazy."""

    def look(self, uid: int) -> WaitingRequest:
        """The waiting request of this uid as it is now.

        Raises:
            KeyError: nobody of this uid waits.
        """

    def running(self) -> Iterator[RunningRequest]:
        """Requests with pages, by arrival; lazy."""


class Prefill(msgspec.Struct, frozen=True):
    """Compute the next tokens of request ``uid`` that are known, admitting it if it waits.

    Attributes:
        uid: names the request.
        tokens: so many; fewer are computed if more of them are found in the cache by then.
    """

    uid: int
    tokens: int


class Plan(msgspec.Struct, frozen=True):
    """One step.

    Attributes:
        prefill: what to compute of prompts, in batch order.
        decode: whether every request that decodes takes one token in this step.
    """

    prefill: tuple[Prefill, ...] = ()
    decode: bool = True


class Policy(ABC):
    """Decides what the next step computes.

    Args:
        options: an instance of the spec's ``options`` struct.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def plan(self, view: QueueView) -> Plan:
        """Decide the next step. Pure; see the module's rule.

        The plan keeps to ``view.limits``; the scheduler checks it and treats a breach as a bug of the policy. A plan
        that computes nothing is one as well, so that the ranks never turn round in vain: something can be computed
        whenever this is asked. It is none only while a running request awaits its last token.
        """

    def retraction_order(self, request: RunningRequest) -> tuple[int, ...]:
        """Where a running request stands when the pool runs dry: the largest gives its pages up first.

        Pure, as :meth:`plan` is. Different for any two requests, and the same for one request as long as it lives: it
        must not depend on ``length`` or ``pending``. So there is one that never gives its pages up, and ends; then the
        next. Admit in the same order, or age, so that whoever comes first does not wait for ever for its turn.

        Unless a policy overrides it, the youngest goes first.
        """
        return (request.arrival,)
