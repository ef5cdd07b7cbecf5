"""The ``sync`` kind: how the ranks agree on what a round holds.

The leader *announces* a round and sends its frames; every follower *receives* the announcement, and only then takes
the round's frames from the fan-out. **The guarantee**: announcements arrive once each and in order, or both sides get
an error at the deadline. One that is damaged, lost or repeated on its way over a fan-out is an error too, never another
announcement. An announcement never waits for anything that a follower does later than receiving it, save taking the
frames of earlier rounds. A rank that dies is noticed within 5 seconds by who waits for it; by who waits for another,
and by ``connect``, perhaps only at the deadline, where an implementation cannot look at all of them. A stranger, who
connects to where ranks meet and says nothing, or nonsense, takes no rank's place, delays none beyond a deadline and
makes none fail. A rank is used by one thread at a time; only ``close`` may be called meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tpserve.api.specs import Options
from tpserve.api.transport import FanoutReceiver, FanoutSender

__all__ = ["HEARTBEAT", "Announcement", "Sync", "SyncContext"]

HEARTBEAT = -1
"""The ``count`` of an announcement that is a sign of life and not a round."""


class Announcement(msgspec.Struct, frozen=True):
    """What the leader says of a round: five signed 64-bit integers.

    Attributes:
        round: the round's number, from 0. A heartbeat repeats the last one.
        first_frame: how many frames were fanned out before this round.
        count: how many frames this round has, or HEARTBEAT.
        digest_round: the newest round that the leader has finished, or -1.
        digest: the leader's decision digest as of ``digest_round``.
    """

    round: int
    first_frame: int
    count: int
    digest_round: int
    digest: int

    @property
    def is_heartbeat(self) -> bool:
        """Whether this is a sign of life and not a round."""
        return self.count == HEARTBEAT


class SyncContext(msgspec.Struct, frozen=True):
    """What a :class:`Sync` is built from.

    Attributes:
        rank: this rank; 0 leads.
        size: the number of ranks, ≥ 2.
        run_dir: the group's private directory on this host, for rendezvous files.
        name: unique in ``run_dir``; a prefix for whatever the implementation puts there.
        fanout: this rank's end of the fan-out, connected before :meth:`Sync.connect` is called.
    """

    rank: int
    size: int
    run_dir: Path
    name: str
    fanout: FanoutSender | FanoutReceiver


class Sync(ABC):
    """One rank's end of the count synchronisation. After an error, of :meth:`connect` too, it can only be closed.

    Args:
        options: an instance of the spec's ``options`` struct.
        context: who this rank is.
    """

    def __init__(self, options: Options, context: SyncContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def connect(self, deadline: float) -> None:
        """Wait until all ranks have joined. It is called once, before anything else.

        Raises:
            DeadlineExceeded: not all came.
            PeerLost: one that came has gone.
        """

    @abstractmethod
    def announce(self, announcement: Announcement, deadline: float) -> None:
        """Leader only: tell every follower. Heartbeats come this way.

        Raises:
            DeadlineExceeded: a follower did not take an earlier announcement in time.
            PeerLost: a follower has gone.
        """

    def send_round(self, announcement: Announcement, frames: Sequence[bytes], deadline: float) -> None:
        """Leader only: announce a round and send its frames over the fan-out.

        Announces and then sends; an implementation whose announcements travel on the fan-out sends all at once.

        Args:
            announcement: of the round; its ``count`` is the number of frames.
            frames: the round's frames, which may be none.
            deadline: when to give up.

        Raises:
            DeadlineExceeded: a follower did not take an earlier round in time.
            PeerLost: a follower has gone.
        """
        fanout = self.context.fanout
        assert isinstance(fanout, FanoutSender), "only the leader sends rounds"
        self.announce(announcement, deadline)
        fanout.send_many(frames, deadline)

    @abstractmethod
    def receive(self, deadline: float) -> Announcement:
        """Follower only: wait for the next announcement, heartbeats included.

        Raises:
            DeadlineExceeded: none came: the leader is silent.
            PeerLost: the leader has gone.
            SyncError, FrameError: what came is damaged, no announcement, or not the next one.
        """

    @abstractmethod
    def barrier(self, deadline: float) -> None:
        """Wait until every rank has called this. Only for start-up: the leader waits for followers here.

        Raises:
            DeadlineExceeded: not all came.
            PeerLost: a rank has gone.
            SyncError, FrameError: what came is no sign of a rank at the barrier.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what :meth:`connect` took. May be called twice.

        At the leader it waits a bounded time until the followers have taken what was announced.
        """
