"""What the supervisor tells the api process, what it hears back, and how the links of a generation reach it.

The api process outlives the others: it listens from its first moment, and answers 503 until a :class:`ServeEvent` has
come and its warm-up request has gone through the whole chain. When a process of the group dies, a :class:`DownEvent`
makes it answer 503 again. What is in flight waits; the next generation's ServeEvent makes it healthy, over new links,
and what waits is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tpserve.api import PipeReceiver, PipeSender
from tpserve.step import EngineLimits

__all__ = ["Control", "ControlEvent", "DownEvent", "Links", "OpenLinks", "PingEvent", "ServeEvent", "StopEvent"]


class ServeEvent(msgspec.Struct, frozen=True, tag="serve"):
    """The group is ready: connect its links, send the warm-up request, then be healthy.

    Attributes:
        generation: how often the group has been started, from 1.
        limits: what the engine has, agreed over all ranks.
    """

    generation: int
    limits: EngineLimits


class DownEvent(msgspec.Struct, frozen=True, tag="down"):
    """A process died: /health is 503 and requests in flight wait, until the next ServeEvent.

    Attributes:
        reason: one line for /health and for the clients.
    """

    reason: str


class StopEvent(msgspec.Struct, frozen=True, tag="stop"):
    """Let running requests finish, send Shutdown to every tokenizer, return. The last event.

    Requests that wait for the next generation end with an error: there is none.
    """


class PingEvent(msgspec.Struct, frozen=True, tag="ping"):
    """Answer, if you still can."""


ControlEvent = ServeEvent | DownEvent | StopEvent | PingEvent


class Control(Protocol):
    """The api process's line to the supervisor."""

    def receive(self) -> ControlEvent:
        """Wait for the next event; called from one thread of its own, until a StopEvent."""

    def alive(self) -> None:
        """The answer to a PingEvent, called by the loop that does all the work."""

    def serving(self) -> None:
        """The warm-up has come back: /health is 200 from now on."""

    def failed(self, reason: str) -> None:
        """A link broke, or the warm-up was refused: clients get 503 until the next ServeEvent; any thread calls it."""


@dataclass(frozen=True, slots=True)
class Links:
    """The api process's ends of one generation's links.

    Attributes:
        receiver: replies of detokenizers and refusals of tokenizers; bound.
        tokenizers: one sender to each tokenizer, not yet connected.
    """

    receiver: PipeReceiver
    tokenizers: Sequence[PipeSender]


OpenLinks = Callable[[int], Links]
"""Makes the ends of a generation's links; called once for each ServeEvent."""
