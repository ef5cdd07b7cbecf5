"""The leader's intake: frames that are handed out as if a tokenizer had sent them, and the times at which they came."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable

from tpserve.api import PipeReceiver

__all__ = ["Feed"]

NANOSECONDS = 1_000_000_000


class Feed(PipeReceiver):
    """Hands out what it was offered.

    A frame arrives when it is due. One that is due at once arrives when it is asked for, and one that somebody sleeps
    for when he wakes: how late the system wakes a sleeper is no matter of the transport.

    Attributes:
        arrivals: when each frame that was handed out arrived, in nanoseconds on the monotonic clock.
        bytes: of all of them.
        taken_at: when frames, or none, were last handed out.
    """

    def __init__(self) -> None:
        self.arrivals = array("q")
        self.bytes = 0
        self.taken_at = 0
        self._frames: deque[tuple[int, bytes]] = deque()

    def forget(self) -> None:
        """Count anew."""
        self.arrivals = array("q")
        self.bytes = 0

    def offer(self, frames: Iterable[bytes]) -> None:
        """Add frames that are due at once."""
        self._frames.extend((0, frame) for frame in frames)

    def offer_at(self, frames: Iterable[tuple[int, bytes]]) -> None:
        """Add frames with the times at which they are due, in order."""
        self._frames.extend(frames)

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        """Wait for a first frame, then take what is due; see :class:`PipeReceiver`."""
        asked_at = time.monotonic_ns()
        if self._frames and self._frames[0][0] > asked_at:
            until = min(deadline, self._frames[0][0] / NANOSECONDS)
            time.sleep(max(0.0, until - asked_at / NANOSECONDS))
        frames: list[bytes] = []
        due: list[int] = []
        size = 0
        now = time.monotonic_ns()
        while self._frames and self._frames[0][0] <= now and len(frames) < max_frames and size < max_bytes:
            at, frame = self._frames.popleft()
            due.append(at)
            frames.append(frame)
            size += len(frame)
        self.taken_at = time.monotonic_ns()
        for at in due:
            self.arrivals.append(at if 0 < at <= asked_at else self.taken_at)
        self.bytes += size
        return frames

    def close(self) -> None:
        """Nothing is held."""
