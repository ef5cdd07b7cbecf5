"""Syncs that each break one promise, made from built-in ones; and the contract applied to the one in FAULT."""

import os
import struct
import threading
import time

import pytest
from msgspec.structs import replace

from tpserve.api import Announcement, DeadlineExceeded, NoOptions, PeerLost, SyncSpec
from tpserve.sync.gloo import GlooSync
from tpserve.sync.inband import InbandSync
from tpserve.sync.options import ShmOptions
from tpserve.sync.ring import PUBLISHED, SLOTS, WORDS
from tpserve.sync.shm import ShmSync
from tpserve.testing.sync import SyncContract

FIVE = struct.Struct("<5q")
HIGHEST = (1 << 63) - 1


class Sound(ShmSync):
    """Breaks nothing."""


class Losing(ShmSync):
    def announce(self, announcement, deadline):
        if announcement.round != 100:
            super().announce(announcement, deadline)


class SeldomLosing(ShmSync):
    """One in three thousand."""

    def announce(self, announcement, deadline):
        if announcement.round != 2999:
            super().announce(announcement, deadline)


class Repeating(ShmSync):
    """Now and then, so that a few hundred announcements show nothing."""

    def announce(self, announcement, deadline):
        for _ in range(2 if announcement.round % 500 == 499 else 1):
            super().announce(announcement, deadline)


class Babbling(ShmSync):
    """Repeats the last one, which nobody compares with a next one."""

    def announce(self, announcement, deadline):
        for _ in range(2 if announcement.digest == HIGHEST else 1):
            super().announce(announcement, deadline)


class RepeatingToMany(ShmSync):
    """Where there are more than two ranks."""

    said = 0

    def announce(self, announcement, deadline):
        self.said += 1
        for _ in range(2 if self.said % 1000 == 0 and self.context.size > 2 else 1):
            super().announce(announcement, deadline)


class ShortRound(ShmSync):
    """Its rounds have 16 bits."""

    def announce(self, announcement, deadline):
        super().announce(replace(announcement, round=announcement.round & 0xFFFF), deadline)


class ShortFirstFrame(ShmSync):
    """Knows where a round begins in 40 bits."""

    def announce(self, announcement, deadline):
        super().announce(replace(announcement, first_frame=announcement.first_frame & 0xFF_FFFF_FFFF), deadline)


class SeldomShort(ShmSync):
    """Knows where a round begins in 62 bits, or all."""

    def announce(self, announcement, deadline):
        first = announcement.first_frame
        super().announce(replace(announcement, first_frame=first if first == HIGHEST else first % 2**62), deadline)


class ShortCount(ShmSync):
    """Counts frames in 15 bits."""

    def announce(self, announcement, deadline):
        count = announcement.count if announcement.is_heartbeat else announcement.count & 0x7FFF
        super().announce(replace(announcement, count=count), deadline)


class ShortDigestRound(ShmSync):
    """Its digests are of rounds of 31 bits."""

    def announce(self, announcement, deadline):
        digest_round = announcement.digest_round if announcement.digest_round < 0 else announcement.digest_round % 2**31
        super().announce(replace(announcement, digest_round=digest_round), deadline)


class ShortDigest(ShmSync):
    """Its digests have 53 bits, as integers do that are floats."""

    def announce(self, announcement, deadline):
        super().announce(replace(announcement, digest=int(float(announcement.digest)) % 2**63), deadline)


class Silent(ShmSync):
    """Loses signs of life."""

    def announce(self, announcement, deadline):
        if not announcement.is_heartbeat or announcement.digest < 0:
            super().announce(announcement, deadline)


class Stinting(ShmSync):
    """Loses the last frame of a round of very many."""

    def send_round(self, announcement, frames, deadline):
        super().send_round(announcement, frames[:-1] if len(frames) > 2000 else frames, deadline)


class Frameless(ShmSync):
    """Announces a round and forgets to send it."""

    def send_round(self, announcement, frames, deadline):
        self.announce(announcement, deadline)


class Generous(ShmSync):
    """Sends a round's frames twice."""

    def send_round(self, announcement, frames, deadline):
        super().send_round(announcement, [*frames, *frames], deadline)


class Racing(ShmSync):
    """Waits for the fastest follower, and writes over what the others have not heard."""

    def connect(self, deadline):
        super().connect(deadline)
        ring, readers = self._ring, range(self.context.size - 1)
        ring.is_full = lambda: (
            ring._words[PUBLISHED] >= SLOTS + max(ring._words[WORDS * (1 + reader)] for reader in readers)
        )


class OneSided(ShmSync):
    """Waits for the first follower."""

    def connect(self, deadline):
        super().connect(deadline)
        ring = self._ring
        ring.is_full = lambda: ring._words[PUBLISHED] >= SLOTS + ring._words[WORDS]


class Polling(ShmSync):
    """Its leader looks again and again whether it may go on."""

    def announce(self, announcement, deadline):
        while True:
            try:
                super().announce(announcement, 0)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
            else:
                return


class Restless(ShmSync):
    """Looks at the clock until the others come."""

    def connect(self, deadline):
        done = threading.Event()
        looking = threading.Thread(target=self.look, args=(done,))
        looking.start()
        try:
            super().connect(deadline)
        finally:
            done.set()
            looking.join()

    def look(self, done):
        while not done.is_set():
            time.monotonic()


class Waiting(GlooSync):
    """Its leader waits until the followers have heard it."""

    def announce(self, announcement, deadline):
        super().announce(announcement, deadline)
        while self._posted:
            self._finish(self._posted.popleft(), deadline)


class Open(ShmSync):
    """Its barrier holds nobody."""

    def barrier(self, deadline): ...


class OpenAtLast(ShmSync):
    """Its fourth barrier holds nobody."""

    passed = 0

    def barrier(self, deadline):
        self.passed += 1
        if self.passed != 4:
            super().barrier(deadline)


class Patient(ShmSync):
    """At a barrier it takes one that has gone for one that is late."""

    def barrier(self, deadline):
        try:
            super().barrier(deadline)
        except PeerLost:
            time.sleep(max(0, deadline - time.monotonic()))
            raise DeadlineExceeded("not all came") from None


class Narrow(ShmSync):
    """Does not hear of others than the first follower that they have gone."""

    def _look(self):
        if self._meeting.lost() == 1:
            super()._look()


class Abrupt(GlooSync):
    """Forgets what is under way when it closes."""

    def close(self):
        self._posted.clear()
        super().close()


class Leaking(ShmSync):
    """Opens something to wait with, each time."""

    def barrier(self, deadline):
        os.eventfd(0)
        super().barrier(deadline)


class Slow(ShmSync):
    """Notices a death too late."""

    def announce(self, announcement, deadline):
        self.late(super().announce, announcement, deadline)

    def receive(self, deadline):
        return self.late(super().receive, deadline)

    def late(self, call, *arguments):
        try:
            return call(*arguments)
        except PeerLost:
            time.sleep(3)
            raise


class Late(ShmSync):
    """Misses a deadline by more than the contract leaves."""

    def receive(self, deadline):
        return self.late(super().receive, deadline)

    def barrier(self, deadline):
        self.late(super().barrier, deadline)

    def connect(self, deadline):
        self.late(super().connect, deadline)

    def late(self, call, *arguments):
        try:
            return call(*arguments)
        except TimeoutError:
            time.sleep(3)
            raise


class Swallowing(ShmSync):
    """Says nothing of a death for a while."""

    swallowed = 0

    def announce(self, announcement, deadline):
        try:
            super().announce(announcement, deadline)
        except PeerLost:
            self.swallowed += 1
            if self.swallowed > 100:
                raise


class Credulous(InbandSync):
    """Takes what comes for the next announcement."""

    def send_round(self, announcement, frames, deadline):
        said = FIVE.pack(
            announcement.round,
            announcement.first_frame,
            announcement.count,
            announcement.digest_round,
            announcement.digest,
        )
        self.context.fanout.send_many([said, *frames], deadline)

    def receive(self, deadline):
        (frame,) = self.context.fanout.recv_many(1, deadline)
        return Announcement(*FIVE.unpack(frame))


class TestFaulty(SyncContract):
    @pytest.fixture
    def spec(self):
        name = os.environ["FAULT"]
        options = ShmOptions if issubclass(globals()[name], ShmSync) else NoOptions
        return SyncSpec(name="faulty", summary="breaks a promise", factory=f"{__name__}:{name}", options=options)
