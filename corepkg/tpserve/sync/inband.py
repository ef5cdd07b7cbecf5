"""Announcements on the fan-out itself: one frame before the frames of a round, all in one send.

A follower that waits for the announcement wakes once, and finds the round's frames beside it. Nothing is added to what
the fan-out guarantees, and nothing else can fail. A fan-out goes one way only, so ranks meet for start-up and barriers
at a socket in the run directory; which is why they all must be on one host.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpserve.api import Announcement, FanoutReceiver, FanoutSender, Options, Sync, SyncContext
from tpserve.distributed.meeting import Meeting
from tpserve.sync.wire import decode, encode

__all__ = ["InbandSync"]


class InbandSync(Sync):
    """One rank's end."""

    def __init__(self, options: Options, context: SyncContext) -> None:
        super().__init__(options, context)
        self._meeting = Meeting(context)
        self._number = 0

    def connect(self, deadline: float) -> None:
        """Meet the others."""
        if self.context.rank == 0:
            self._meeting.lead([], deadline)
        else:
            self._meeting.follow(0, deadline)

    def announce(self, announcement: Announcement, deadline: float) -> None:
        """Send the announcement alone."""
        self.send_round(announcement, [], deadline)

    def send_round(self, announcement: Announcement, frames: Sequence[bytes], deadline: float) -> None:
        """Send the announcement and the frames after it in one go."""
        fanout = self.context.fanout
        assert isinstance(fanout, FanoutSender), "only the leader announces"
        fanout.send_many([encode(announcement, self._number), *frames], deadline)
        self._number += 1

    def receive(self, deadline: float) -> Announcement:
        """Take one frame off the fan-out."""
        fanout = self.context.fanout
        assert isinstance(fanout, FanoutReceiver), "only followers receive"
        (frame,) = fanout.recv_many(1, deadline)
        number, self._number = self._number, self._number + 1
        return decode(frame, number)

    def barrier(self, deadline: float) -> None:
        """Wait at the socket in the run directory."""
        self._meeting.barrier(deadline)

    def close(self) -> None:
        """Leave the meeting. The fan-out belongs to others, and its close is what ends a wait for an announcement."""
        self._meeting.close()
