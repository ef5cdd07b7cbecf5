"""What the supervisor tells the api process, and what it hears back.

The api process listens from its first moment and answers 503 until a :class:`ServeEvent` has come and its warm-up
request has gone through the whole chain. It reports dictionaries with a key ``event``:

    {"event": "serving"}                     the warm-up has come back: /health is 200 from now on
    {"event": "failed", "reason": "…"}       the warm-up was refused, or a link broke: it answers 503 and waits
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from tpserve.step import EngineLimits

__all__ = ["Control", "ControlEvent", "DownEvent", "QueueControl", "ServeEvent", "StopEvent"]


class ServeEvent(msgspec.Struct, frozen=True, tag="serve"):
    """All ranks are ready: send the warm-up request, then be healthy.

    Attributes:
        limits: what the engine has, agreed over all ranks.
    """

    limits: EngineLimits


class DownEvent(msgspec.Struct, frozen=True, tag="down"):
    """A process died: /health is 503 and requests in flight end with an error, until the next ServeEvent.

    Attributes:
        reason: one line for /health and for the clients.
    """

    reason: str


class StopEvent(msgspec.Struct, frozen=True, tag="stop"):
    """Let running requests finish, send Shutdown to every tokenizer, return. The last event."""


ControlEvent = ServeEvent | DownEvent | StopEvent


class Control(Protocol):
    """The api process's line to the supervisor."""

    def receive(self) -> ControlEvent:
        """Wait for the next event; called from one thread of its own, until a StopEvent."""

    def report(self, event: dict[str, Any]) -> None:
        """Tell the supervisor something; does not block for long."""


class QueueControl:
    """A :class:`Control` that somebody else feeds.

    Args:
        report: takes the reports; called from the api process's event loop.
    """

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        self._events: SimpleQueue[ControlEvent] = SimpleQueue()
        self._report = report

    def put(self, event: ControlEvent) -> None:
        """Queue an event; callable from any thread."""
        self._events.put(event)

    def receive(self) -> ControlEvent:
        """Wait for the next event."""
        return self._events.get()

    def report(self, event: dict[str, Any]) -> None:
        """Pass a report on."""
        self._report(event)
