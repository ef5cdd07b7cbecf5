"""Which calls are under way, so that nothing is closed under them."""

from __future__ import annotations

import time
from collections import deque
from threading import get_ident

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
        self._under_way: deque[int] = deque()  # of which thread; its methods are atomic, and quicker than a lock

    def __enter__(self) -> None:
        self._under_way.append(get_ident())
        if self.closed:
            self._under_way.remove(get_ident())
            self.check_open()

    def __exit__(self, *error: object) -> None:
        self._under_way.remove(get_ident())

    def check_open(self) -> None:
        """Raise Closed, if they were ended."""
        if self.closed:
            raise Closed("the link was closed")

    def end(self) -> None:
        """Wait until the last has ended, but for one of this thread: a signal came in the midst of it."""
        self.closed = True
        latest, own = time.monotonic() + LONGEST, get_ident()
        while len(self._under_way) > self._under_way.count(own) and time.monotonic() < latest:
            time.sleep(BREATH)
