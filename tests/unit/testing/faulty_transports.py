"""Transports that each break one promise, made from the inproc one; and the contract applied to the one in FAULT."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tpserve.api import (
    FanoutReceiver,
    FanoutSender,
    PipeReceiver,
    PipeSender,
    TransportCapabilities,
    TransportError,
    TransportSpec,
    UnsupportedByPlugin,
)
from tpserve.api.ends import Ends
from tpserve.testing import lab
from tpserve.testing.transport import TransportContract
from tpserve.transports.inproc import InprocTransport

LATE = 3.0
"""Seconds, more than the contract leaves."""


def late(call, *arguments):
    """Call it, and be late with what is too late."""
    try:
        return call(*arguments)
    except TimeoutError:
        time.sleep(LATE)
        raise


def poll(call, deadline):
    """Call it again and again instead of waiting."""
    while True:
        try:
            return call(0)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise


def turned(frame):
    half = len(frame) // 2
    return frame[half:] + frame[:half] if half > 2 << 20 else frame


class Sender(FanoutSender):
    """Passes everything on."""

    def __init__(self, sender: FanoutSender) -> None:
        self.sender = sender
        self.sent = 0

    def connect(self, deadline: float) -> None:
        self.sender.connect(deadline)

    def send_many(self, frames, deadline: float) -> None:
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


class SeldomLosingSender(Sender):
    """Loses what only a test of many frames can notice."""

    def send_one(self, frame, deadline):
        if self.sent % 1000 != 999:
            super().send_one(frame, deadline)


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


class SeldomLosingPipeSender(CarelessSender):
    sent = 0

    def send(self, frame, deadline):
        self.sent += 1
        if self.sent % 1000:
            self.sender.send(frame, deadline)


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


class Sound(InprocTransport):
    """Breaks nothing; subclasses say what wraps which end."""

    fanout_out: type = Sender
    fanout_in: type | None = None
    pipe_out: type | None = None
    pipe_in: type | None = None

    def fanout_sender(self, address, followers):
        return self.fanout_out(super().fanout_sender(address, followers))

    def fanout_receiver(self, address, follower, followers):
        end = super().fanout_receiver(address, follower, followers)
        return self.fanout_in(end) if self.fanout_in else end

    def pipe_sender(self, address):
        end = super().pipe_sender(address)
        return self.pipe_out(end) if self.pipe_out else end

    def pipe_receiver(self, address):
        end = super().pipe_receiver(address)
        return self.pipe_in(end) if self.pipe_in else end


class Losing(Sound):
    fanout_out = LosingSender


class SeldomLosing(Sound):
    fanout_out = SeldomLosingSender
    pipe_out = SeldomLosingPipeSender


class Doubling(Sound):
    fanout_out = DoublingSender


class Swapping(Sound):
    fanout_out = SwappingSender


class Cutting(Sound):
    fanout_out = CuttingSender


class Forgetting(Sound):
    fanout_out = ForgettingSender


class Hasty(Sound):
    fanout_out = HastySender


class Polling(Sound):
    fanout_in = PollingReceiver


class PollingToSend(Sound):
    fanout_out = PollingSender
    pipe_out = PollingPipeSender


class PollingToJoin(Sound):
    fanout_in = PollingJoiner


class Turning(Sound):
    fanout_out = TurningSender
    pipe_out = TurningPipeSender


class Keeping(Sound):
    fanout_in = KeepingReceiver
    pipe_in = KeepingReceiver


class Forgetful(Sound):
    fanout_in = ForgetfulReceiver


class Careless(Sound):
    pipe_out = CarelessSender


class Sleepy(Sound):
    pipe_in = SleepyReceiver


class LateLeader(Sound):
    fanout_out = LateSender


class LateFollower(Sound):
    fanout_in = LateReceiver


class LatePipe(Sound):
    pipe_out = LatePipeSender
    pipe_in = LatePipeReceiver


class Naming(Sound):
    fanout_out = NamingSender


class Lending(Sound):
    fanout_in = LendingReceiver
    pipe_in = LendingPipeReceiver


class Eager(Sound):
    fanout_in = EagerReceiver


class Usurping(Sound):
    """Gives an address to who comes last."""

    def fanout_sender(self, address, followers):
        self.forget(f"{address}.0")
        return super().fanout_sender(address, followers)

    def pipe_receiver(self, address):
        self.forget(address)
        return super().pipe_receiver(address)

    def forget(self, name):
        if self._queue(name).has_leader or self._queue(name).has_reader:
            del self._queues[name]


class Hospitable(Sound):
    """Lets everybody in who says the number of a follower."""

    def fanout_receiver(self, address, follower, followers):
        end = super().fanout_receiver(address, follower, followers)
        connect = end.connect

        def welcome(deadline):
            with suppress(TransportError):
                connect(deadline)

        end.connect = welcome
        return end


class Touchy(Sound):
    """Takes the end of somebody it refused for that of a follower."""

    def fanout_receiver(self, address, follower, followers):
        end = super().fanout_receiver(address, follower, followers)
        close = end.close

        def leave():
            close()
            end._queue.change(reader_left=True)

        end.close = leave
        return end


class Undying(Sound):
    """Makes ends after its own end."""

    def close(self):
        super().close()
        self._ends = Ends()


class Trampling(Sound):
    """Makes way for itself."""

    def fanout_sender(self, address, followers):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        return super().fanout_sender(address, followers)


class Wrapping(Sound):
    """Takes any number for a follower's."""

    def fanout_receiver(self, address, follower, followers):
        return super().fanout_receiver(address, follower % followers, followers)


class Sharing(Sound):
    """Lets two be one follower, and each of them two."""

    def fanout_sender(self, address, followers):
        return super().fanout_sender(address, 1)


class Unparsing(Sound):
    """Takes any text for an address."""

    def fanout_sender(self, address, followers):
        return super().fanout_sender(f"ipc:///any/{address}", followers)


class PipesOnly(InprocTransport):
    """Has no fan-outs, and says so: that breaks nothing."""

    def fanout_sender(self, address, *others):
        raise UnsupportedByPlugin("there are no fan-outs")

    fanout_receiver = fanout_sender


class Hiding(Sound):
    """Has fan-outs and pipes, and does not say so."""


class Boastful(Sound):
    """Says that it reaches other machines."""


INSIDE = TransportCapabilities(fanout=True, pipes=True, multi_process=False)
CAPABILITIES = {
    "PipesOnly": TransportCapabilities(fanout=False, pipes=True, multi_process=False),
    "Hiding": TransportCapabilities(fanout=False, pipes=False, multi_process=False),
    "Boastful": TransportCapabilities(fanout=True, pipes=True, multi_node=True),
}


class TestFaulty(TransportContract):
    @pytest.fixture
    def spec(self):
        return TransportSpec(
            name="faulty",
            summary="breaks a promise",
            factory=f"{__name__}:{os.environ['FAULT']}",
            capabilities=CAPABILITIES.get(os.environ["FAULT"], INSIDE),
        )
