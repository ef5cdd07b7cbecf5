"""Ends of pipes that break a promise each; those of fan-outs, and what they share, are in :mod:`faulty_ends`."""

import time
from contextlib import suppress

from tests.unit.testing.faulty_ends import LATE, frayed, late, poll, turned

from tpserve.api import Closed, PipeReceiver, PipeSender


class SleepyReceiver(PipeReceiver):
    """Cannot be woken."""

    def __init__(self, receiver: PipeReceiver) -> None:
        self.receiver = receiver

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        while not (frames := self.receiver.recv_many(max_frames, max_bytes, 0)):
            time.sleep(0.01)
        return frames

    def close(self) -> None: ...


class LatePipeReceiver(SleepyReceiver):
    def recv_many(self, max_frames, max_bytes, deadline):
        frames = self.receiver.recv_many(max_frames, max_bytes, deadline)
        if not frames:
            time.sleep(LATE)
        return frames


class ServingPipeReceiver(SleepyReceiver):
    """Unpacks all that has come, and hands it out, closed or not."""

    def __init__(self, receiver):
        super().__init__(receiver)
        self.unpacked = []

    def recv_many(self, max_frames, max_bytes, deadline):
        if not self.unpacked or not max_frames:
            self.unpacked += self.receiver.recv_many(1000 * max_frames, 1 << 20, deadline)
        taken, self.unpacked = self.unpacked[:max_frames], self.unpacked[max_frames:]
        return taken

    def close(self):
        self.receiver.close()


class UnaskingPipeReceiver(ServingPipeReceiver):
    """Takes no frames, closed or not."""

    def recv_many(self, max_frames, max_bytes, deadline):
        return self.receiver.recv_many(max_frames, max_bytes, deadline) if max_frames else []


class LendingPipeReceiver(SleepyReceiver):
    def recv_many(self, max_frames, max_bytes, deadline):
        return [memoryview(frame) for frame in self.receiver.recv_many(max_frames, max_bytes, deadline)]


class CarelessSender(PipeSender):
    """Sends what it has refused."""

    def __init__(self, sender: PipeSender) -> None:
        self.sender = sender
        self.refused: list[bytes] = []

    def connect(self, deadline: float) -> None:
        self.sender.connect(deadline)

    def send(self, frame: bytes, deadline: float) -> None:
        while self.refused:
            self.sender.send(self.refused[0], deadline)
            del self.refused[0]
        try:
            self.sender.send(frame, deadline)
        except TimeoutError:
            self.refused.append(frame)
            raise

    def close(self) -> None:
        self.sender.close()


class BarePipeSender(CarelessSender):
    """Says in its library's words that it was closed."""

    def send(self, frame, deadline):
        try:
            self.sender.send(frame, deadline)
        except Closed as error:
            raise OSError("bad file descriptor") from error


class LingeringPipeSender(CarelessSender):
    """Closes late, though nobody has anything to take."""

    def close(self):
        time.sleep(LATE)
        super().close()


class AcceptingPipeSender(CarelessSender):
    """Says once that it was closed."""

    has_told = False

    def send(self, frame, deadline):
        try:
            super().send(frame, deadline)
        except Closed:
            if not self.has_told:
                self.has_told = True
                raise


class FragilePipeSender(CarelessSender):
    """Closes once."""

    def close(self):
        assert self.sender is not None
        self.sender.close()
        self.sender = None


class RejoiningPipeSender(CarelessSender):
    """Finds a receiver, closed or not."""

    def connect(self, deadline):
        with suppress(Closed):
            self.sender.connect(deadline)


class SeldomLosingPipeSender(CarelessSender):
    sent = 0

    def send(self, frame, deadline):
        self.sent += 1
        if self.sent % 1000:
            self.sender.send(frame, deadline)


class FrayingPipeSender(CarelessSender):
    def send(self, frame, deadline):
        self.sender.send(frayed(frame), deadline)


class TurningPipeSender(CarelessSender):
    def send(self, frame, deadline):
        self.sender.send(turned(frame), deadline)


class PollingPipeSender(CarelessSender):
    def connect(self, deadline):
        poll(self.sender.connect, deadline)

    def send(self, frame, deadline):
        poll(lambda at_once: self.sender.send(frame, at_once), deadline)


class LatePipeSender(CarelessSender):
    def connect(self, deadline):
        late(self.sender.connect, deadline)

    def send(self, frame, deadline):
        late(self.sender.send, frame, deadline)
