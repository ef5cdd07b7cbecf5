"""Transports and syncs that meet at a socket and each break one promise there; and the contracts applied to FAULT's."""

import fcntl
import math
import os
import socket
import struct
import time
from contextlib import closing, suppress

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

GREETING = b"tps1"


def read_one(door, deadline):
    """Let the first who comes in, and wait for what it says."""
    door.settimeout(max(0.001, deadline - time.monotonic()))
    guest = door.accept()[0]
    guest.settimeout(3)
    guest.recv(4)
    return guest


class Sound(InprocTransport):
    """Meets at a socket first, and breaks nothing."""

    greeting = GREETING
    size = len(GREETING)

    def fanout_sender(self, address, followers):
        sender = super().fanout_sender(address, followers)
        door = self.open_door(address, sender)
        connect = sender.connect

        def meet(deadline):
            came = 0
            with closing(self.guests(door, deadline)) as guests:
                while came < followers:
                    came += self.greet(*next(guests))
            connect(deadline)

        sender.connect = meet
        return sender

    def pipe_receiver(self, address):
        receiver = super().pipe_receiver(address)
        door = self.open_door(address, receiver)
        receive = receiver.recv_many

        def look_and_receive(most, size, deadline):
            self.look(door)
            return receive(most, size, deadline)

        receiver.recv_many = look_and_receive
        return receiver

    def open_door(self, address, end):
        """Listen at an address until an end is closed."""
        door, path, close = socket.socket(socket.AF_UNIX), ipc_path(address), end.close

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
        door.listen(16)
        end.close = leave
        return door

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
                    end.send(self.greeting)
                connect(deadline)

        receiver.connect = meet
        return receiver

    def guests(self, door, deadline):
        return greetings(door, self.size, deadline, lambda: "nobody came")

    def greet(self, guest, greeting):
        """Whether this is a follower."""
        guest.close()
        return greeting == self.greeting

    def look(self, door):
        """Nobody is expected."""

    def dial(self, end, path):
        return dial(end, path)


class Trusting(Sound):
    """Waits for what a stranger says."""

    def guests(self, door, deadline):
        while True:
            yield read_one(door, deadline), GREETING


class Believing(Sound):
    """Waits for the rest of a greeting that has begun well."""

    size = 1

    def greet(self, guest, greeting):
        guest.settimeout(3)
        with guest, suppress(TimeoutError):
            while GREETING.startswith(greeting) and greeting != GREETING and (more := guest.recv(1)):
                greeting += more
        return greeting == GREETING


class Gullible(Sound):
    """Takes whoever says something for a follower."""

    def greet(self, guest, greeting):
        guest.close()
        return True


class Bare(Sound):
    """Knows a follower by a number alone."""

    greeting = struct.pack("<I", 1)
    size = len(greeting)


class Touchy(Sound):
    """Wants to have to do with nobody but followers."""

    def greet(self, guest, greeting):
        if not super().greet(guest, greeting):
            raise TransportError(f"somebody says {greeting}")
        return True


class Curious(Sound):
    """Listens on, and fails when somebody comes who is not expected."""

    def fanout_sender(self, address, followers):
        sender = super().fanout_sender(address, followers)
        door = self.open_door(f"{address}.late", sender)
        send_many = sender.send_many

        def look_and_send(frames, deadline):
            self.look(door)
            send_many(frames, deadline)

        sender.send_many = look_and_send
        return sender

    def look(self, door):
        door.setblocking(False)
        with suppress(BlockingIOError):
            door.accept()[0].close()
            raise TransportError("somebody has come")


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


class GullibleMeeting(meeting.Meeting):
    def _welcome(self, peer, greeting):
        self._add(len(self._peers) + 1, peer)


class TouchyMeeting(meeting.Meeting):
    def _welcome(self, peer, greeting):
        super()._welcome(peer, greeting)
        if self._stray:
            raise TransportError(self._stray)


class HalfMeeting(meeting.Meeting):
    """Knows a follower by half of what it says."""

    def _welcome(self, peer, greeting):
        whole = meeting.greeting_of(1)
        super()._welcome(peer, whole if len(greeting) > 1 and whole.startswith(greeting) else greeting)


class BareMeeting(meeting.Meeting):
    """Knows a follower by a number alone."""

    def _welcome(self, peer, greeting):
        super()._welcome(peer, greeting if greeting.startswith(meeting.MAGIC) else meeting.MAGIC + greeting)


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


class GullibleSync(ShmSync):
    """Takes whoever says something for the next rank."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self._meeting = GullibleMeeting(context)


class TouchySync(ShmSync):
    """Wants to have to do with nobody but its ranks."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self._meeting = TouchyMeeting(context)


class HalfSync(ShmSync):
    """Knows a rank by half of what it says."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self._meeting = HalfMeeting(context)


class BareSync(ShmSync):
    """Knows a rank by a number alone."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self._meeting = BareMeeting(context)


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
    pipes_too = False

    @pytest.fixture
    def spec(self):
        return TransportSpec(
            name="faulty",
            summary="breaks a promise",
            factory=f"{__name__}:{os.environ['FAULT']}",
            capabilities=TransportCapabilities(fanout=True, pipes=self.pipes_too, multi_process=False),
        )


class TestFaultyPipes(TestFaulty):
    pipes_too = True


class TestFaultySync(SyncContract):
    @pytest.fixture
    def spec(self):
        factory = f"{__name__}:{os.environ['FAULT']}Sync"
        return SyncSpec(name="faulty", summary="breaks a promise", factory=factory, options=ShmOptions)
