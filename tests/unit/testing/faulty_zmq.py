"""Transports that each break one promise between processes, made from zmq; and the contract applied to FAULT's."""

import fcntl
import math
import os
import time

import pytest

from tpserve.api import PeerLost, TransportCapabilities, TransportSpec
from tpserve.api.addresses import ipc_path
from tpserve.api.flow import OVERHEAD, Window
from tpserve.testing.transport import TransportContract
from tpserve_transport_zmq.fanout import ZmqFanoutReceiver, ZmqFanoutSender
from tpserve_transport_zmq.pipe import ZmqPipeSender
from tpserve_transport_zmq.plugin import ZmqOptions
from tpserve_transport_zmq.transport import ZmqTransport


class Sender(ZmqFanoutSender):
    """Breaks nothing."""


class PipeSender(ZmqPipeSender):
    """Breaks nothing."""


class DroppingSender(Sender):
    """Drops a frame in 10,000, once it had to wait."""

    sent = 0
    has_waited = False

    def _await_room(self, batch, deadline):
        self.has_waited = True
        super()._await_room(batch, deadline)

    def send_many(self, frames, deadline):
        self.sent += len(frames)
        super().send_many(frames[self.has_waited and self.sent % 10_000 == 0 :], deadline)


class DroppingPipeSender(PipeSender):
    sent = 0

    def send(self, frame, deadline):
        self.sent += 1
        if self.sent % 10_000:
            super().send(frame, deadline)


class HoardingSender(Sender):
    """Keeps a copy of what it has sent."""

    def connect(self, deadline):
        super().connect(deadline)
        self.kept = []

    def send_many(self, frames, deadline):
        super().send_many(frames, deadline)
        self.kept += [bytearray(frame) * 20 for frame in frames]


class FastWindow(Window):
    """Counts how far the fastest follower is behind."""

    def has_room(self, frames):
        slow = self._returned
        self._returned = dict.fromkeys(slow, max(slow.values()))
        has_room = super().has_room(frames)
        self._returned = slow
        return has_room


class FrameWindow(Window):
    """Counts frames and not bytes, and allows 300."""

    def __init__(self, size, receivers):
        super().__init__(300 * OVERHEAD, receivers)

    def has_room(self, frames):
        return super().has_room([b""] * len(frames))

    def add(self, frames):
        return super().add([b""] * len(frames))


class OneSidedWindow(Window):
    """Counts how far the first follower is behind."""

    def has_room(self, frames):
        returned = self._returned
        self._returned = {0: returned[0]}
        has_room = super().has_room(frames)
        self._returned = returned
        return has_room


class RacingSender(Sender):
    window = FastWindow

    def connect(self, deadline):
        self._window = self.window(self._options.send_buffer, range(self._count))
        super().connect(deadline)


class OneSidedSender(RacingSender):
    window = OneSidedWindow


class FrameSender(RacingSender):
    window = FrameWindow


class FramePipeSender(PipeSender):
    def connect(self, deadline):
        self._window = FrameWindow(self._options.send_buffer, ["receiver"])
        super().connect(deadline)


class NarrowSender(Sender):
    """While it waits for room it does not see who dies."""

    told = 0

    def _ask(self):
        if self.told != self._window.mark():
            self.told = self._window.mark()
            super()._ask()


class UncountingSender(Sender):
    """Does not hold empty frames back."""

    def send_many(self, frames, deadline):
        super().send_many([frame for frame in frames if frame], deadline)


class SlowSender(Sender):
    """Notices a death too late."""

    def send_many(self, frames, deadline):
        try:
            super().send_many(frames, deadline)
        except PeerLost:
            time.sleep(3)
            raise


class SwallowingSender(Sender):
    """Says nothing of a death for a while."""

    swallowed = 0

    def send_many(self, frames, deadline):
        try:
            super().send_many(frames, deadline)
        except PeerLost:
            self.swallowed += 1
            if self.swallowed > 100:
                raise


class LeakingSender(Sender):
    def send_many(self, frames, deadline):
        os.eventfd(0)
        super().send_many(frames, deadline)


class Receiver(ZmqFanoutReceiver):
    """Breaks nothing."""


class LockingReceiver(Receiver):
    """Waits for a lock, which somebody may have who was stopped."""

    def connect(self, deadline):
        with ipc_path(self._address).with_name("lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        super().connect(deadline)


class PatientReceiver(Receiver):
    """Waits for a leader as long as it takes it."""

    def connect(self, deadline):
        super().connect(math.inf)


class PatientSender(Sender):
    """Waits for followers as long as it takes them."""

    def connect(self, deadline):
        super().connect(math.inf)


class Sound(ZmqTransport):
    """Breaks nothing; subclasses say what sends."""

    fanout_out = Sender
    fanout_in = Receiver
    pipe_out = PipeSender

    def fanout_sender(self, address, followers):
        return self._ends.add(lambda: self.fanout_out(self._guarded(), self._options, address, followers))

    def fanout_receiver(self, address, follower, followers):
        return self._ends.add(lambda: self.fanout_in(self._guarded(), self._options, address, follower))

    def pipe_sender(self, address):
        return self._ends.add(lambda: self.pipe_out(self._guarded(), self._options, address))


class Locking(Sound):
    fanout_in = LockingReceiver


class PatientFollowing(Sound):
    fanout_in = PatientReceiver


class PatientLeading(Sound):
    fanout_out = PatientSender


class Dropping(Sound):
    fanout_out = DroppingSender
    pipe_out = DroppingPipeSender


class Hoarding(Sound):
    fanout_out = HoardingSender


class Racing(Sound):
    fanout_out = RacingSender


class OneSided(Sound):
    fanout_out = OneSidedSender


class FrameBound(Sound):
    fanout_out = FrameSender
    pipe_out = FramePipeSender


class Narrow(Sound):
    fanout_out = NarrowSender


class Uncounting(Sound):
    fanout_out = UncountingSender


class Slow(Sound):
    fanout_out = SlowSender


class Swallowing(Sound):
    fanout_out = SwallowingSender


class Leaking(Sound):
    fanout_out = LeakingSender


class Parsing(Sound):
    """Has errors of Python's own for addresses."""

    def fanout_sender(self, address, followers):
        if not address.startswith("ipc:"):
            int(address.rpartition(":")[2])
        return super().fanout_sender(address, followers)


class TestFaulty(TransportContract):
    @pytest.fixture
    def spec(self):
        return TransportSpec(
            name="faulty",
            summary="breaks a promise",
            factory=f"{__name__}:{os.environ['FAULT']}",
            options=ZmqOptions,
            capabilities=TransportCapabilities(fanout=True, pipes=True),
        )
