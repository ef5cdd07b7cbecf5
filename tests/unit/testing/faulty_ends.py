"""Ends of fan-outs that each break one promise, around one that keeps them all; what those of pipes need, too."""

import time
from contextlib import suppress
from pathlib import Path

from tpserve.api import Closed, DeadlineExceeded, FanoutReceiver, FanoutSender
from tpserve.testing import lab

LATE = 3.0
"""Seconds, more than the contract leaves."""


def late(call, *arguments):
    """Call it, and be late with what is too late."""
    try:
        return call(*arguments)
    except TimeoutError:
        time.sleep(LATE)
        raise


def poll(call, deadline, nap=None):
    """Call it again and again instead of waiting."""
    while True:
        try:
            return call(0)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise
            if nap:
                time.sleep(nap)


def turned(frame):
    half = len(frame) // 2
    return frame[half:] + frame[:half] if half > 2 << 20 else frame


def frayed(frame):
    return frame[:-1] + bytes([frame[-1] ^ 1]) if len(frame) in (65535, 65536, 65537, 131072) else frame


class Sender(FanoutSender):
    """Passes everything on."""

    def __init__(self, sender: FanoutSender) -> None:
        self.sender = sender
        self.sent = 0

    def connect(self, deadline: float) -> None:
        self.sender.connect(deadline)

    def send_many(self, frames, deadline: float) -> None:
        if not frames:
            self.sender.send_many([], deadline)
        for frame in frames:
            self.send_one(frame, deadline)
            self.sent += 1

    def send_one(self, frame: bytes, deadline: float) -> None:
        self.sender.send_many([frame], deadline)

    def close(self) -> None:
        self.sender.close()


class LosingSender(Sender):
    def send_one(self, frame, deadline):
        if self.sent % 20 != 19:
            super().send_one(frame, deadline)


class MiscountingSender(Sender):
    """Loses the last of more than 2,000 frames of one call."""

    def send_many(self, frames, deadline):
        super().send_many(frames[:-1] if len(frames) > 2000 else frames, deadline)


class MiscountingReceiver(FanoutReceiver):
    """Takes no more than 2,000 frames at once, and forgets the one after them."""

    def __init__(self, receiver: FanoutReceiver) -> None:
        self.receiver = receiver

    def connect(self, deadline: float) -> None:
        self.receiver.connect(deadline)

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        frames = self.receiver.recv_many(count, deadline)
        return frames[:2000] + frames[2001:]

    def close(self) -> None:
        self.receiver.close()


class FrayingSender(Sender):
    """Damages frames that just fill a buffer, or just do not."""

    def send_many(self, frames, deadline):
        super().send_many([frayed(frame) for frame in frames], deadline)


class FrayingTogetherSender(Sender):
    """The same, where there is more than one frame."""

    def send_many(self, frames, deadline):
        super().send_many([frayed(frame) for frame in frames] if len(frames) > 1 else frames, deadline)


class SeldomLosingSender(Sender):
    """Loses what only a test of many frames can notice."""

    def send_one(self, frame, deadline):
        if self.sent % 1000 != 999:
            super().send_one(frame, deadline)


class WrappingSender(Sender):
    """Loses the frame that its count of 16 bits cannot tell from none."""

    def send_many(self, frames, deadline):
        last = (1 << 16) - 1 - self.sent
        self.sent += len(frames)
        self.sender.send_many([*frames[:last], *frames[last + 1 :]] if last >= 0 else frames, deadline)


class BareSender(Sender):
    """Says in its library's words that it was closed."""

    def send_one(self, frame, deadline):
        try:
            super().send_one(frame, deadline)
        except Closed as error:
            raise OSError("bad file descriptor") from error


class LingeringSender(Sender):
    """Closes late, though nobody has anything to take."""

    def close(self):
        time.sleep(LATE)
        super().close()


class AcceptingSender(Sender):
    """Says once that it was closed."""

    has_told = False

    def send_one(self, frame, deadline):
        try:
            super().send_one(frame, deadline)
        except Closed:
            if not self.has_told:
                self.has_told = True
                raise


class UnaskingSender(Sender):
    """Sends nothing, closed or not."""

    def send_many(self, frames, deadline):
        if frames:
            self.sender.send_many(frames, deadline)


class FragileSender(Sender):
    """Closes once."""

    def close(self):
        assert self.sender is not None
        self.sender.close()
        self.sender = None


class RejoiningSender(Sender):
    """Asks anew for followers when it was closed."""

    def connect(self, deadline):
        try:
            self.sender.connect(deadline)
        except Closed as error:
            raise DeadlineExceeded("nobody came") from error


class LitteringSender(Sender):
    """Removes its file if all have come."""

    def __init__(self, sender, file):
        super().__init__(sender)
        self.file = file
        file.touch()

    def connect(self, deadline):
        super().connect(deadline)
        self.file.unlink()


class DoublingSender(Sender):
    def send_one(self, frame, deadline):
        self.sender.send_many([frame] * (2 if self.sent == 19 else 1), deadline)


class SwappingSender(Sender):
    def send_many(self, frames, deadline):
        super().send_many([*frames[1:], *frames[:1]], deadline)


class CuttingSender(Sender):
    def send_one(self, frame, deadline):
        super().send_one(frame[: 1 << 20], deadline)


class ForgettingSender(Sender):
    """Drops what finds no room, as publishers do."""

    def send_one(self, frame, deadline):
        with suppress(TimeoutError):
            super().send_one(frame, time.monotonic() + 0.001)


class HastySender(Sender):
    """Says that it is ready, and drops what is sent before the followers are."""

    def connect(self, deadline): ...

    def send_one(self, frame, deadline):
        try:
            self.sender.connect(0)
        except TimeoutError:
            return
        super().send_one(frame, deadline)


class TurningSender(Sender):
    """Puts the halves of what is large in the wrong order."""

    def send_one(self, frame, deadline):
        super().send_one(turned(frame), deadline)


class PollingSender(Sender):
    def connect(self, deadline):
        poll(super().connect, deadline)

    def send_one(self, frame, deadline):
        poll(lambda at_once: super(PollingSender, self).send_one(frame, at_once), deadline)


class LateSender(Sender):
    def connect(self, deadline):
        late(super().connect, deadline)

    def send_one(self, frame, deadline):
        late(super().send_one, frame, deadline)


class NamingSender(Sender):
    """Leaves a name in shared memory."""

    def connect(self, deadline):
        super().connect(deadline)
        Path(lab.SHARED_MEMORY, str(time.monotonic_ns())).touch()


class PollingReceiver(FanoutReceiver):
    def __init__(self, receiver: FanoutReceiver) -> None:
        self.receiver = receiver

    def connect(self, deadline: float) -> None:
        self.receiver.connect(deadline)

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        return poll(lambda at_once: self.receiver.recv_many(count, at_once), deadline)

    def close(self) -> None:
        self.receiver.close()


class NappingReceiver(PollingReceiver):
    """Looks again and again, and sleeps in between."""

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        return poll(lambda at_once: self.receiver.recv_many(count, at_once), deadline, nap=0.0005)


class ForgetfulReceiver(PollingReceiver):
    """Loses what came before a deadline."""

    def recv_many(self, count, deadline):
        frames = []
        while len(frames) < count:
            frames += self.receiver.recv_many(1, deadline)
        return frames


class PollingJoiner(PollingReceiver):
    def connect(self, deadline):
        poll(super().connect, deadline)

    def recv_many(self, count, deadline):
        return self.receiver.recv_many(count, deadline)


class KeepingReceiver(PollingReceiver):
    """Forgets nothing, ever."""

    def __init__(self, receiver):
        super().__init__(receiver)
        self.kept = []

    def recv_many(self, *arguments):
        frames = self.receiver.recv_many(*arguments)
        self.kept += frames
        return frames


class LateReceiver(PollingReceiver):
    def connect(self, deadline):
        late(super().connect, deadline)

    def recv_many(self, count, deadline):
        return late(self.receiver.recv_many, count, deadline)


class LendingReceiver(PollingReceiver):
    def recv_many(self, count, deadline):
        return [bytearray(frame) for frame in self.receiver.recv_many(count, deadline)]


class EagerReceiver(PollingReceiver):
    """Waits for a frame, though none is asked for."""

    def __init__(self, receiver):
        super().__init__(receiver)
        self.kept = []

    def recv_many(self, count, deadline):
        if not self.kept:
            self.kept = self.receiver.recv_many(1, deadline)
        taken = self.kept + self.receiver.recv_many(count - 1, deadline) if count else []
        self.kept = [] if count else self.kept
        return taken


class DeafReceiver(PollingReceiver):
    """Cannot be woken, and is closed later."""

    def recv_many(self, count, deadline):
        return self.receiver.recv_many(count, deadline)

    def close(self): ...


class ServingReceiver(PollingReceiver):
    """Unpacks all that has come, and hands it out, closed or not."""

    def __init__(self, receiver):
        super().__init__(receiver)
        self.unpacked = []

    def recv_many(self, count, deadline):
        if len(self.unpacked) < count or not count:
            self.unpacked += self.receiver.recv_many(count - len(self.unpacked) if count else 0, deadline)
            self.unpack()
        taken, self.unpacked = self.unpacked[:count], self.unpacked[count:]
        return taken

    def unpack(self):
        with suppress(DeadlineExceeded):
            while True:
                self.unpacked += self.receiver.recv_many(1, 0)


class UnaskingReceiver(PollingReceiver):
    """Takes no frames, closed or not."""

    def recv_many(self, count, deadline):
        return self.receiver.recv_many(count, deadline) if count else []


class RejoiningReceiver(PollingReceiver):
    """Joins, closed or not, and sees later that it was closed."""

    def connect(self, deadline):
        self.receiver._is_reader = self.receiver._is_reader or self.receiver._queue.claim_reader()
        self.receiver.connect(deadline)

    def recv_many(self, count, deadline):
        return self.receiver.recv_many(count, deadline)
