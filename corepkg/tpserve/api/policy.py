"""The ``policy`` kind: what runs in the next step.

A policy is a pure function from a read-only view to a plan. **The rule**: equal views give equal plans, in
every process and on every machine; so no clock, no randomness, no iteration over a ``set``, no ``id()`` or ``hash()``
of an object, and no state kept between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import msgspec

from tpserve.api.specs import Options

__all__ = ["Limits", "Plan", "Policy", "Prefill", "QueueView", "RunningRequest", "WaitingRequest"]


class WaitingRequest(msgspec.Struct, frozen=True):
    """A request that holds no pages yet.

    Attributes:
        uid: names the request.
        arrival: its place in the message stream; smaller came earlier.
        tokens: prompt tokens to compute, plus output tokens for a request that is resumed.
        reserve: the most tokens that it can ever hold in the KV cache.
        priority: larger is more urgent; 0 unless the client said otherwise.
    """

    uid: int
    arrival: int
    tokens: int
    reserve: int
    priority: int


class RunningRequest(msgspec.Struct, frozen=True):
    """A request that holds pages.

    Attributes:
        uid: names the request.
        arrival: its place in the message stream.
        length: tokens whose keys and values are in the cache.
        pending: prompt tokens still to compute; 0 when it decodes.
        reserve: the most tokens that it can ever hold in the KV cache.
        priority: larger is more urgent.
    """

    uid: int
    arrival: int
    length: int
    pending: int
    reserve: int
    priority: int


class Limits(msgspec.Struct, frozen=True):
    """What a plan must keep to.

    Attributes:
        tokens: the most tokens that one step may compute; a prompt longer than this runs alone.
        running: the most requests that may hold pages.
        free_pages: pages that no request holds or has reserved.
        page_size: tokens a page.
    """

    tokens: int
    running: int
    free_pages: int
    page_size: int

    def pages(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens of one request take."""
        return -(-tokens // self.page_size)


class QueueView(Protocol):
    """What a policy sees. Reading it changes nothing.

    ``waiting`` runs in order of arrival and costs what is read of it: a policy that stops early never pays for
    the rest of a long queue.
    """

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

    def waiting(self) -> Iterator[WaitingRequest]:
        """Requests without pages, by arrival; lazy."""

    def running(self) -> Iterator[RunningRequest]:
        """Requests with pages, by arrival; lazy."""


class Prefill(msgspec.Struct, frozen=True):
    """Compute the next ``tokens`` prompt tokens of request ``uid``, admitting it if it waits."""

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

        The plan keeps to ``view.limits``; the scheduler checks it and treats a breach as a bug of the policy.
        """
