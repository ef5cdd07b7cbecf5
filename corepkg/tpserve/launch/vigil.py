"""Whether children still answer; one that is stopped or hangs has not ended, and nobody else would notice."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tpserve.frontend.control import PingEvent
from tpserve.launch.process import Child

__all__ = ["Vigil"]

PINGS = 6
"""A child is given up when it has left so many pings unanswered.

Pings are counted, not seconds: if the starter itself stands still, or the whole machine, nobody is blamed for it.
"""


class Vigil:
    """Pings children.

    Args:
        children: whom.
        patience: seconds of silence after which one is given up.

    Attributes:
        due: when to ping next, on the monotonic clock.
    """

    def __init__(self, children: Iterable[Child], patience: float) -> None:
        self._unanswered = dict.fromkeys(children, 0)
        self._period = patience / PINGS
        self.due = time.monotonic() + self._period

    def heard(self, child: Child) -> None:
        """A child has answered."""
        self._unanswered[child] = 0

    def ping(self) -> Child | None:
        """Ping all; call it when it is due and all answers were heard. Returns a child that is to be given up."""
        silent = next((child for child, count in self._unanswered.items() if count >= PINGS), None)
        for child in self._unanswered:
            child.send(PingEvent())
            self._unanswered[child] += 1
        self.due = time.monotonic() + self._period
        return silent
