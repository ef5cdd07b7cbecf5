"""Announcements in shared memory: a sequence word that followers watch for a moment and then sleep on.

The memory has no name: the leader makes it and hands its descriptor round when the ranks meet, so that whatever way
they end, nothing is left of it. The sockets of that meeting tell when a rank has gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from threading import Lock

from tpserve.api import Announcement, Closed, DeadlineExceeded, FanoutSender, Options, PeerLost, Sync, SyncContext
from tpserve.distributed.meeting import Meeting
from tpserve.sync.options import ShmOptions
from tpserve.sync.ring import Ring

__all__ = ["ShmSync"]

LOOK = 0.5
"""Seconds between looks whether the other side is still there; so long a follower sleeps at most."""

LITTLE = 64 << 10
"""Bytes of a round that a fan-out takes before they are read. If it does not, a follower sleeps on for LOOK at most."""

BREATH = 0.001
"""Seconds between looks whether a follower that is a whole ring behind has moved."""


class ShmSync(Sync):
    """One rank's end."""

    def __init__(self, options: Options, context: SyncContext) -> None:
        super().__init__(options, context)
        assert isinstance(options, ShmOptions)
        self._spin = options.spin / 1e6
        self._came_soon = False
        self._meeting = Meeting(context)
        self._ring: Ring | None = None
        self._next_look = 0.0
        self._lock = Lock()
        self._closed = False

    def connect(self, deadline: float) -> None:
        """Meet the others, and share the memory."""
        if self.context.rank == 0:
            descriptor = Ring.create(self.context.size - 1)
            try:
                self._meeting.lead([descriptor], deadline)
                self._share(descriptor)
            finally:
                os.close(descriptor)
        else:
            (descriptor,) = self._meeting.follow(1, deadline)
            try:
                if self._meeting.cores() == 1:
                    self._spin = 0.0
                self._share(descriptor)
            finally:
                os.close(descriptor)

    def announce(self, announcement: Announcement, deadline: float) -> None:
        """Write into the ring; waits only for a follower that is 1,024 announcements behind."""
        self._publish(announcement, deadline)
        self._wake()

    def send_round(self, announcement: Announcement, frames: Sequence[bytes], deadline: float) -> None:
        """Announce and send; a follower that sleeps is woken once for both, unless there is much to read."""
        fanout = self.context.fanout
        assert isinstance(fanout, FanoutSender), "only the leader sends rounds"
        self._publish(announcement, deadline)
        if not frames:
            self._wake()
            return
        if sum(map(len, frames)) > LITTLE:
            self._wake()
        try:
            fanout.send_many(frames, deadline)
        finally:
            self._wake()

    def receive(self, deadline: float) -> Announcement:
        """Take the next announcement; those of a leader that has gone come first."""
        with self._lock:
            begun = time.monotonic()
            announcement = self._next(deadline)
            self._came_soon = time.monotonic() < begun + self._spin
            return announcement

    def barrier(self, deadline: float) -> None:
        """Wait at the socket in the run directory."""
        self._meeting.barrier(deadline)

    def close(self) -> None:
        """Leave the others; a call that waits in another thread ends with Closed."""
        self._closed = True
        if self._ring is not None:
            self._ring.wake()
        with self._lock:
            self._meeting.close()
            if self._ring is not None:
                self._ring.close()

    def _share(self, descriptor: int) -> None:
        with self._lock:
            if self._closed:
                raise Closed("the synchronisation was closed")
            self._ring = Ring(descriptor, self.context.size - 1)

    def _publish(self, announcement: Announcement, deadline: float) -> None:
        with self._lock:
            ring = self._open_ring()
            if time.monotonic() >= self._next_look:
                self._look()
            while ring.is_full():
                self._look()
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded("a follower does not take announcements")
                time.sleep(BREATH)
                ring = self._open_ring()
            ring.write(announcement)

    def _wake(self) -> None:
        with self._lock:
            if not self._closed:
                self._open_ring().wake()

    def _next(self, deadline: float) -> Announcement:
        ring, reader = self._open_ring(), self.context.rank - 1
        spin = self._spin if self._came_soon else 0.0
        is_lost = False
        while (announcement := ring.read(reader)) is None:
            if is_lost:
                raise PeerLost("the leader has gone")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded("the leader is silent")
            has_come = ring.wait(reader, spin, min(LOOK, remaining))
            ring, spin = self._open_ring(), 0.0
            is_lost = not has_come and self._meeting.lost() is not None
        return announcement

    def _open_ring(self) -> Ring:
        if self._closed:
            raise Closed("the synchronisation was closed")
        assert self._ring is not None, "connect() comes first"
        return self._ring

    def _look(self) -> None:
        """See that all followers are there."""
        rank = self._meeting.lost()
        if rank is not None:
            raise PeerLost(f"rank {rank} has gone")
        self._next_look = time.monotonic() + LOOK
