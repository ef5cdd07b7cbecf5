"""The round: how every rank gets the same messages at the same point of its life.

A leader takes what has arrived, announces how much that is, forwards it raw, and decodes last. A follower waits for an
announcement, takes exactly that many frames, and decodes. Each role is a :class:`RoundSource`; the scheduler does not
know which it has.

Before it asks for a round with ``block=True`` the scheduler has finished and answered everything in flight.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from threading import Condition
from types import TracebackType

import msgspec

from tpserve.api.sync import HEARTBEAT, Announcement, Sync
from tpserve.api.transport import FanoutReceiver, FanoutSender, PipeReceiver
from tpserve.envelope import Opener
from tpserve.errors import Closed, DeadlineExceeded, FrameError, PeerLost, RankError, SyncError
from tpserve.messages import RankMessage, decode_ranks
from tpserve.scheduler.digest import DecisionLog

__all__ = ["Caps", "FollowerSource", "LeaderSource", "OfflineSource", "Round", "RoundSource", "SingleSource"]


class Caps(msgspec.Struct, frozen=True):
    """How much one round takes.

    Attributes:
        messages: at most so many messages.
        bytes: no more messages once this many bytes are reached.
    """

    messages: int = 256
    bytes: int = 64 << 20


class Round(msgspec.Struct, frozen=True):
    """What arrived in one round, the same on every rank.

    Attributes:
        number: from 0, without gaps.
        messages: in the order that the leader took them; may be empty.
    """

    number: int
    messages: list[RankMessage]


class RoundSource(ABC):
    """Where a rank's rounds come from."""

    @abstractmethod
    def receive(self, block: bool) -> Round:
        """The next round.

        Args:
            block: there is no work: wait for a first message. Otherwise take what is there, which may be nothing.
                All ranks call with the same value, as all know whether there is work; a follower waits for the
                leader either way.

        Raises:
            RankError: a frame is damaged or missing, a peer is silent or gone, or ranks diverged; this rank must stop.
            Closed: :meth:`close` was called.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the links that rounds come over. May be called twice.

        From another thread it wakes a source that waits for a first message; a follower waits on for its leader.
        """


class SingleSource(RoundSource):
    """The only rank.

    Args:
        intake: what the tokenizers send to.
        caps: how much a round takes.
    """

    def __init__(self, intake: PipeReceiver, caps: Caps) -> None:
        self._intake = intake
        self._caps = caps
        self._decoder = _Decoder(rank=0)
        self._number = 0

    def receive(self, block: bool) -> Round:
        """The next round; see :class:`RoundSource`."""
        deadline = float("inf") if block else 0.0
        with _Stops(0, self._number, "frames from the tokenizers"):
            frames = self._intake.recv_many(self._caps.messages, self._caps.bytes, deadline)
        number, self._number = self._number, self._number + 1
        return Round(number, self._decoder.decode(number, frames))

    def close(self) -> None:
        """Close the intake."""
        self._intake.close()


class LeaderSource(RoundSource):
    """Rank 0 of several: takes, announces, forwards, decodes.

    Args:
        intake: what the tokenizers send to.
        fanout: the way to the followers; closed in the end.
        sync: announces to the followers and sends over the fan-out, connected.
        log: this rank's decisions; its digest goes out with each announcement.
        caps: how much a round takes.
        heartbeat: seconds between signs of life while there is nothing to do.
        watchdog: seconds that a follower may take to read.
    """

    def __init__(
        self,
        intake: PipeReceiver,
        fanout: FanoutSender,
        sync: Sync,
        log: DecisionLog,
        caps: Caps,
        heartbeat: float,
        watchdog: float,
    ) -> None:
        self._intake = intake
        self._fanout = fanout
        self._sync = sync
        self._log = log
        self._caps = caps
        self._heartbeat = heartbeat
        self._watchdog = watchdog
        self._readers = f"followers that read within {watchdog:g} s"
        self._decoder = _Decoder(rank=0)
        self._number = 0
        self._frames = 0

    def receive(self, block: bool) -> Round:
        """The next round; see :class:`RoundSource`."""
        frames = self._wait() if block else self._take(0.0)
        self._send(frames)
        number, self._number = self._number, self._number + 1
        return Round(number, self._decoder.decode(number, frames))

    def close(self) -> None:
        """Close the intake, the announcements and the fan-out."""
        self._intake.close()
        self._sync.close()
        self._fanout.close()

    def _wait(self) -> list[bytes]:
        while True:
            frames = self._take(time.monotonic() + self._heartbeat)
            if frames:
                return frames
            with _Stops(0, self._number, self._readers):
                heartbeat = self._announcement(self._number - 1, HEARTBEAT)
                self._sync.announce(heartbeat, time.monotonic() + self._watchdog)

    def _take(self, deadline: float) -> list[bytes]:
        with _Stops(0, self._number, "frames from the tokenizers"):
            return self._intake.recv_many(self._caps.messages, self._caps.bytes, deadline)

    def _send(self, frames: Sequence[bytes]) -> None:
        with _Stops(0, self._number, self._readers):
            announcement = self._announcement(self._number, len(frames))
            self._sync.send_round(announcement, frames, time.monotonic() + self._watchdog)
        self._frames += len(frames)

    def _announcement(self, number: int, count: int) -> Announcement:
        return Announcement(number, self._frames, count, *self._log.latest)


class FollowerSource(RoundSource):
    """A rank that follows: waits for an announcement, then takes exactly the frames it speaks of.

    Args:
        fanout: this rank's end of the fan-out, connected.
        sync: where announcements arrive, connected.
        log: this rank's decisions, held to the leader's digests.
        watchdog: seconds without a sign of life after which the leader is given up.
        rank: this rank, for errors.
    """

    def __init__(self, fanout: FanoutReceiver, sync: Sync, log: DecisionLog, watchdog: float, rank: int) -> None:
        self._fanout = fanout
        self._sync = sync
        self._log = log
        self._watchdog = watchdog
        self._rank = rank
        self._signs = f"an announcement or a heartbeat within {watchdog:g} s"
        self._decoder = _Decoder(rank)
        self._number = 0
        self._frames = 0

    def receive(self, block: bool) -> Round:
        """The next round; see :class:`RoundSource`."""
        count = self._await_announcement()
        frames = self._take(count)
        number, self._number = self._number, self._number + 1
        return Round(number, self._decoder.decode(number, frames))

    def close(self) -> None:
        """Close the announcements and the fan-out."""
        self._sync.close()
        self._fanout.close()

    def _await_announcement(self) -> int:
        while True:
            with _Stops(self._rank, self._number, self._signs):
                announcement = self._sync.receive(time.monotonic() + self._watchdog)
            self._check(announcement)
            self._log.expect(announcement.digest_round, announcement.digest)
            if not announcement.is_heartbeat:
                return announcement.count

    def _check(self, announcement: Announcement) -> None:
        number = self._number - 1 if announcement.is_heartbeat else self._number
        if announcement.round != number:
            raise RankError(self._rank, self._number, f"round {number} announced", f"round {announcement.round}")
        if announcement.first_frame != self._frames:
            raise RankError(
                self._rank,
                self._number,
                f"a round that begins at frame {self._frames}",
                f"one that begins at frame {announcement.first_frame}",
            )
        if announcement.count < HEARTBEAT:
            raise RankError(self._rank, self._number, "a count of frames", announcement.count)

    def _take(self, count: int) -> list[bytes]:
        if not count:
            return []
        with _Stops(self._rank, self._number, f"{count} frames within {self._watchdog:g} s"):
            frames = self._fanout.recv_many(count, time.monotonic() + self._watchdog)
        self._frames += count
        return frames


class OfflineSource(RoundSource):
    """The only rank, fed in its own process: messages as they are, no envelopes.

    Args:
        messages: the most messages that one round takes.
    """

    def __init__(self, messages: int = Caps().messages) -> None:
        self._max_messages = messages
        self._waiting: deque[RankMessage] = deque()
        self._changed = Condition()
        self._closed = False
        self._number = 0

    def put(self, messages: Iterable[RankMessage]) -> None:
        """Add messages for the next rounds; any thread may."""
        with self._changed:
            self._waiting.extend(messages)
            self._changed.notify()

    def receive(self, block: bool) -> Round:
        """The next round; see :class:`RoundSource`."""
        with self._changed:
            if block:
                self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                raise Closed("the offline source is closed")
            count = min(len(self._waiting), self._max_messages)
            messages = [self._waiting.popleft() for _ in range(count)]
        number, self._number = self._number, self._number + 1
        return Round(number, messages)

    def close(self) -> None:
        """Wake a waiting :meth:`receive`."""
        with self._changed:
            self._closed = True
            self._changed.notify()


class _Decoder:
    """Opens frames, holds each producer to its sequence, and decodes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._opener = Opener()

    def decode(self, number: int, frames: Sequence[bytes]) -> list[RankMessage]:
        if not frames:
            return []
        with _Stops(self._rank, number, "intact frames in sequence"):
            return self._decode(frames)

    def _decode(self, frames: Sequence[bytes]) -> list[RankMessage]:
        try:
            return decode_ranks(self._opener.open_all(frames))
        except msgspec.MsgspecError as error:
            raise FrameError(f"a message that no rank understands: {error}") from error


class _Stops:
    """Turns what a link reports into the error with which a rank stops.

    A class, since a generator takes twice as long, and a round comes by here four times.
    """

    __slots__ = ("_expected", "_number", "_rank")

    def __init__(self, rank: int, number: int, expected: str) -> None:
        self._rank = rank
        self._number = number
        self._expected = expected

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, DeadlineExceeded):
            raise RankError(self._rank, self._number, self._expected, f"silence: {error}") from error
        if isinstance(error, FrameError | PeerLost | SyncError):
            raise RankError(self._rank, self._number, self._expected, str(error)) from error
