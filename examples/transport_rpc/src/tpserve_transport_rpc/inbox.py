"""What a leader may call at a follower, and where the frames wait there until they are read."""

from __future__ import annotations

import time
from collections import deque
from threading import Condition

import rpyc

from tpserve.api import Closed, DeadlineExceeded, PeerLost

__all__ = ["Inbox"]

OVERHEAD = 64
LONGEST = 3600.0


class Inbox(rpyc.Service):  # type: ignore[misc]
    """Calls come in a thread of their own, those that read are another.

    Args:
        size: bytes of frames that wait at most, each counted with an overhead of 64; more if they come in one call.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._welcomed = False
        self._ended = False
        self._closed = False
        self._changed = Condition()

    def exposed_welcome(self) -> None:
        """All followers have come."""
        with self._changed:
            self._welcomed = True
            self._changed.notify_all()

    def exposed_take(self, frames: tuple[bytes, ...]) -> None:
        """Take frames, when there is room for them."""
        if type(frames) is not tuple or not all(type(frame) is bytes for frame in frames):
            raise TypeError("expected a tuple of bytes")
        size = sum(map(_cost, frames))
        with self._changed:
            while self._bytes and self._bytes + size > self._size and not self._closed:
                self._changed.wait()
            self._frames.extend(frames)
            self._bytes += size
            self._changed.notify_all()

    def await_welcome(self, deadline: float, late: str) -> None:
        """Wait until all followers have come."""
        with self._changed:
            while not self._welcomed:
                self._wait(deadline, late)

    def move(self, into: list[bytes], count: int, deadline: float) -> None:
        """Move frames into a list until that has ``count``; those that come in time, if not all do."""
        with self._changed:
            while len(into) < count:
                if self._frames:
                    frame = self._frames.popleft()
                    self._bytes -= _cost(frame)
                    into.append(frame)
                    self._changed.notify_all()
                else:
                    self._wait(deadline, f"{len(into)} of {count} frames came")

    def end(self) -> None:
        """Nobody will call any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wake everybody who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, deadline: float, late: str) -> None:
        if self._closed:
            raise Closed("the fan-out was closed")
        if self._ended:
            raise PeerLost("the leader has gone")
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded(late)
        self._changed.wait(min(remaining, LONGEST))


def _cost(frame: bytes) -> int:
    return len(frame) + OVERHEAD
