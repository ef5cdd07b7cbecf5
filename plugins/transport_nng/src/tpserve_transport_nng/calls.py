"""Which calls are under way, so that nothing is closed under them."""

from __future__ import annotations

import time
from collections import deque

from tpserve.api import Closed

__all__ = ["Calls"]

LONGEST = 2.0
"""Seconds that a call may take; one that has not ended then is none: a signal's exception came as it began or ended."""

BREATH = 0.01


class Calls:
    """Calls that are under way, each inside ``with``; none begins any more once they were ended.

    Raises:
        Closed: they were.
    """

    def __init__(self) -> None:
        self.closed = False
        self._under_way: deque[None] = deque()  # its methods are atomic, and quicker than a lock

    def __enter__(self) -> None:
        self._under_way.append(None)
        if self.closed:
            self._under_way.pop()
            self.check_open()

    def __exit__(self, *error: object) -> None:
        self._under_way.pop()

    def check_open(self) -> None:
        """Raise Closed, if they were ended."""
        if self.closed:
            raise Closed("the link was closed")

    def end(self) -> None:
        """Wait until the last has ended."""
        self.closed = True
        latest = time.monotonic() + LONGEST
        while self._under_way and time.monotonic() < latest:
            time.sleep(BREATH)
