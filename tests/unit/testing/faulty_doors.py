"""Transports and syncs that meet at a socket and each break one promise there; and the contracts applied to FAULT's."""

import fcntl
import math
import os
import socket
import time
from contextlib import closing

import pytest

from tpserve.api import SyncSpec, TransportCapabilities, TransportError, TransportSpec
from tpserve.api.addresses import ipc_path
from tpserve.api.doors import dial, greetings
from tpserve.distributed import meeting
from tpserve.sync.options import ShmOptions
from tpserve.sync.shm import ShmSync
from tpserve.testing.sync import SyncContract
from tpserve.testing.transport import TransportContract
from tpserve.transports.inproc import InprocTransport


def read_one(door, deadline):
    """Let the first who comes in, and wait for what it says."""
    door.settimeout(max(0.001, deadline - time.monotonic()))
    guest = door.accept()[0]
    guest.settimeout(3)
    guest.recv(4)
    return guest


class Sound(InprocTransport):
    """Meets at a socket first, and breaks nothing."""

    def fanout_sender(self, address, followers):
        sender, path = super().fanout_sender(address, followers), ipc_path(address)
        door = socket.socket(socket.AF_UNIX)
        connect, close = sender.connect, sender.close

        def meet(deadline):
            for _ in range(followers):
                self.greet(door, deadline).close()
            connect(deadline)

        def leave():
            if door.fileno() >= 0:
                door.close()
                path.unlink(missing_ok=True)
            close()

        try:
            door.bind(str(path))
        except OSError as error:
            door.close()
            raise TransportError(f"cannot listen at {path}: {error}") from error
        door.listen(followers)
        sender.connect, sender.close = meet, leave
        return sender

    def fanout_receiver(self, address, follower, followers):
        receiver, path = super().fanout_receiver(address, follower, followers), ipc_path(address)
        connect = receiver.connect

        def meet(deadline):
            with socket.socket(socket.AF_UNIX) as end:
                while not self.dial(end, path):
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(0.01)
                else:
                    end.send(b"tps1")
                connect(deadline)

        receiver.connect = meet
        return receiver

    def greet(self, door, deadline):
        with closing(greetings(door, 4, deadline, lambda: "nobody came")) as guests:
            return next(guests)[0]

    def dial(self, end, path):
        return dial(end, path)


class Trusting(Sound):
    """Waits for what a stranger says."""

    def greet(self, door, deadline):
        return read_one(door, deadline)


class Queueing(Sound):
    """Waits until it is let in."""

    def dial(self, end, path):
        return not end.connect_ex(str(path))


class Hoping(Sound):
    """Waits for who cannot come."""

    def dial(self, end, path):
        try:
            return super().dial(end, path)
        except TransportError:
            return False


class TrustingMeeting(meeting.Meeting):
    def lead(self, descriptors, deadline):
        with meeting._listener(self._context) as door:
            read_one(door, deadline).close()
        super().lead(descriptors, deadline)


class QueueingMeeting(meeting.Meeting):
    def follow(self, descriptors, deadline):
        with socket.socket(socket.AF_UNIX) as end:
            end.connect_ex(str(self._context.run_dir / self._context.name))
        return super().follow(descriptors, deadline)


class SoundSync(ShmSync):
    """Breaks nothing."""


class TrustingSync(ShmSync):
    """Waits for what a stranger says."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self._meeting = TrustingMeeting(context)


class QueueingSync(ShmSync):
    """Waits until it is let in."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self._meeting = QueueingMeeting(context)


class LockingSync(ShmSync):
    """Waits for a lock, which somebody may have who was stopped."""

    def connect(self, deadline):
        place = self.context.run_dir / "lock"
        with place.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        super().connect(deadline)


class PatientSync(ShmSync):
    """Waits for those who have come as long as it takes them."""

    def connect(self, deadline):
        super().connect(deadline if self.context.rank == 0 else math.inf)


class LitteringSync(ShmSync):
    """Leaves a file if nobody comes."""

    def connect(self, deadline):
        file = self.context.run_dir / "litter"
        file.touch()
        super().connect(deadline)
        file.unlink(missing_ok=True)


class TestFaulty(TransportContract):
    @pytest.fixture
    def spec(self):
        return TransportSpec(
            name="faulty",
            summary="breaks a promise",
            factory=f"{__name__}:{os.environ['FAULT']}",
            capabilities=TransportCapabilities(fanout=True, pipes=False, multi_process=False),
        )


class TestFaultySync(SyncContract):
    @pytest.fixture
    def spec(self):
        factory = f"{__name__}:{os.environ['FAULT']}Sync"
        return SyncSpec(name="faulty", summary="breaks a promise", factory=factory, options=ShmOptions)
