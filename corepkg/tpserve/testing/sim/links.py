"""The links of a simulated group: queues that never wait. What a rank would wait for, it is told it has to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tpserve.api import (
    Announcement,
    Closed,
    DeadlineExceeded,
    FanoutReceiver,
    FanoutSender,
    NoOptions,
    PeerLost,
    PipeReceiver,
    Sync,
    SyncContext,
)

__all__ = ["FollowerEnd", "Intake", "LeaderEnd", "Wire", "WouldBlock"]


class WouldBlock(Exception):
    """A rank waits. It has changed nothing yet, so its round can be begun anew."""


class Intake(PipeReceiver):
    """What the tokenizers send to the leader.

    Attributes:
        frames: on their way.
        beats: how often it says that nothing came, before it lets the leader wait: so many signs of life there are.
    """

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.beats = 0
        self._taken: list[int] = []

    def note(self) -> list[int]:
        """The sizes of the frames that were taken since this was last asked."""
        taken, self._taken = self._taken, []
        return taken

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        """Take what is there."""
        if not self.frames and deadline:
            if not self.beats:
                raise WouldBlock
            self.beats -= 1
            return []
        taken: list[bytes] = []
        size = 0
        while self.frames and len(taken) < max_frames and size < max_bytes:
            taken.append(self.frames.popleft())
            size += len(taken[-1])
            self._taken.append(len(taken[-1]))
        return taken

    def close(self) -> None:
        """There is nothing to close."""


class Wire:
    """All that goes from the leader to one follower.

    Attributes:
        window: how many announcements may be under way.
        leader_left, follower_left: an end was closed.
        leader_is_stuck, follower_is_stuck: that rank does nothing more, and nobody has noticed.
        meddle_frame, meddle_announcement: what happens on the way, if anything does.
    """

    def __init__(self, window: int) -> None:
        self.announcements: deque[Announcement] = deque()
        self.frames: deque[bytes] = deque()
        self.leader_left = self.follower_left = False
        self.leader_is_stuck = self.follower_is_stuck = False
        self.meddle_frame: Callable[[bytes], list[bytes]] | None = None
        self.meddle_announcement: Callable[[Announcement], list[Announcement]] | None = None
        self.window = window

    @property
    def has_room(self) -> bool:
        """Whether the leader can send without waiting for the follower, or will hear why it cannot."""
        return len(self.announcements) < self.window or self.follower_left or self.follower_is_stuck

    @property
    def has_news(self) -> bool:
        """Whether the follower has something to do."""
        return bool(self.announcements) or self.leader_left or self.leader_is_stuck


class LeaderEnd(FanoutSender, Sync):
    """The leader's end of all wires."""

    def __init__(self, wires: list[Wire]) -> None:
        Sync.__init__(self, NoOptions(), SyncContext(0, len(wires) + 1, Path(), "sim", self))
        self._wires = wires

    def connect(self, deadline: float) -> None:
        """All are there."""

    def announce(self, announcement: Announcement, deadline: float) -> None:
        """Put an announcement onto every wire."""
        for wire in self._wires:
            if wire.follower_left:
                raise PeerLost("a follower has gone")
            if not announcement.is_heartbeat and wire.follower_is_stuck and len(wire.announcements) >= wire.window:
                raise DeadlineExceeded("a follower does not read")
            wire.announcements.extend(
                wire.meddle_announcement(announcement) if wire.meddle_announcement else [announcement]
            )

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Put frames onto every wire."""
        for wire in self._wires:
            if wire.meddle_frame:
                for frame in frames:
                    wire.frames.extend(wire.meddle_frame(frame))
            else:
                wire.frames.extend(frames)

    def receive(self, deadline: float) -> Announcement:
        """Only followers do."""
        raise Closed("the leader receives no announcements")

    def barrier(self, deadline: float) -> None:
        """All are there."""

    def close(self) -> None:
        """Leave all wires."""
        for wire in self._wires:
            wire.leader_left = True


class FollowerEnd(FanoutReceiver, Sync):
    """A follower's end of its wire."""

    def __init__(self, wire: Wire, rank: int, size: int) -> None:
        Sync.__init__(self, NoOptions(), SyncContext(rank, size, Path(), "sim", self))
        self._wire = wire

    def connect(self, deadline: float) -> None:
        """The leader is there."""

    def receive(self, deadline: float) -> Announcement:
        """Take the next announcement."""
        wire = self._wire
        if wire.announcements:
            return wire.announcements.popleft()
        if wire.leader_left:
            raise PeerLost("the leader has gone")
        if wire.leader_is_stuck:
            raise DeadlineExceeded("the leader is silent")
        raise WouldBlock

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        """Take frames. An announced frame that is not there yet is lost: they are sent together."""
        frames = self._wire.frames
        if len(frames) < count:
            raise DeadlineExceeded(f"{len(frames)} of {count} frames came")
        return [frames.popleft() for _ in range(count)]

    def announce(self, announcement: Announcement, deadline: float) -> None:
        """Only the leader does."""
        raise Closed("a follower announces nothing")

    def barrier(self, deadline: float) -> None:
        """All are there."""

    def close(self) -> None:
        """Leave the wire."""
        self._wire.follower_left = True
