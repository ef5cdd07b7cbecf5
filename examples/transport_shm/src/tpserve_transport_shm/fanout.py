"""The fan-out: everybody meets at a unix socket, and then the ring carries all frames.

A follower says which it is and hands over a copy of its bell. When all have come, the leader answers each with the
memory and its own bell, and the socket's file goes. From then on the sockets only tell that a peer has gone. The memory
has no name: nothing is left of it, whatever way the processes end, and what a leader has published can be read even
after its death. So closing has nothing to wait for.

A message is a frame, or several small ones: the header's length, the header with the frames' lengths, and the frames.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tpserve.api import FanoutReceiver, FanoutSender, FrameError, PeerLost, TransportError
from tpserve.api.addresses import taking
from tpserve.api.doors import dial
from tpserve.api.flow import NO_MARK, WORD, batches, pack, take, unpack
from tpserve_transport_shm.plugin import ShmOptions
from tpserve_transport_shm.ring import PIECE, RingReader, RingWriter, create
from tpserve_transport_shm.watch import Watch

__all__ = ["ShmFanoutReceiver", "ShmFanoutSender"]

GREETING = struct.Struct("<4sII")
CREDENTIALS = struct.Struct("3i")
MAGIC = b"tps1"
WELCOME = b"!"
ATTEMPTS = 0.01

CROWD = 64
"""Guests who are let in together and say nothing: more would take the descriptors that a process may have."""

PATIENCE = 0.1
"""Seconds that a guest has at least, however many come: a follower speaks at once."""

PACKED = 64 << 10
"""Small frames that are sent together make messages of so many bytes."""

BREATH = 0.01
"""Seconds after which a leader that waits for room looks by itself: no order of a store and a later load is certain, so
a follower may just have missed that room is wanted."""


class ShmFanoutSender(FanoutSender):
    """The leader's end."""

    def __init__(self, options: ShmOptions, path: Path, followers: int) -> None:
        self._options = options
        self._path = path
        self._count = followers
        self._peers: dict[int, socket.socket] = {}
        self._guests: dict[int, tuple[socket.socket, float]] = {}  # since when, in the order in which they came
        self._bells: dict[int, int] = {}
        self._ring: RingWriter | None = None
        self._stray = ""
        self._torn = False
        self._watch = Watch()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with taking(path):
                self._door.bind(str(path))
                self._door.listen(followers)
        except TransportError:
            self._door.close()
            self._watch.shut()
            raise
        self._watch.add(self._door)

    def connect(self, deadline: float) -> None:
        """Wait for each follower, then share the memory with all."""
        with self._watch:
            while len(self._peers) < self._count:
                late = f"{len(self._peers)} of {self._count} followers came to {self._path}{self._stray}"
                found = self._watch.wait(deadline, late)
                self._check(found)
                for descriptor in found:
                    if descriptor in self._guests and len(self._peers) < self._count:
                        self._greet(descriptor)
                if self._door.fileno() in found and self._has_room():
                    self._let_in()
            self._welcome()
            self._watch.remove(self._door)
            self._leave_door()

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Write frames into the ring; they are published together, or in pieces when there is much of them."""
        with self._watch:
            ring = self._ring
            assert ring is not None, "connect() comes first"
            self._check(self._watch.look())
            if self._torn:
                raise TransportError("a frame was sent in part: the fan-out can only be closed")
            self._torn = True
            for batch in batches(frames, PACKED):
                self._write(ring, *_message(batch), deadline)
            self._publish(ring)
            self._torn = False

    def close(self) -> None:
        """Leave the others; they still have what was published."""
        if not self._watch.shut():
            return
        self._leave_door()
        if self._ring is not None:
            self._ring.close()
        for peer in self._peers.values():
            peer.close()
        for bell in self._bells.values():
            os.close(bell)

    def _let_in(self) -> None:
        """Let somebody in, who may be silent for as long as it likes."""
        guest = self._door.accept()[0]
        self._guests[guest.fileno()] = guest, time.monotonic()
        self._watch.add(guest)

    def _has_room(self) -> bool:
        """Whether one more may come in; in a crowd only when the first of it has had its time, and is sent away."""
        if len(self._guests) < CROWD:
            return True
        descriptor, (_, since) = next(iter(self._guests.items()))
        if time.monotonic() < since + PATIENCE:
            time.sleep(BREATH)
            return False
        self._take_out(descriptor).close()
        return True

    def _take_out(self, descriptor: int) -> socket.socket:
        guest, _ = self._guests.pop(descriptor)
        self._watch.remove(guest)
        return guest

    def _greet(self, descriptor: int) -> None:
        """Take a guest that has spoken for a follower, or turn it away."""
        guest = self._take_out(descriptor)
        try:
            greeting, bells, _, _ = socket.recv_fds(guest, GREETING.size, 1)
        except ConnectionError:
            greeting, bells = b"", []
        greetings = [_greeting(follower, self._count) for follower in range(self._count)]
        follower = greetings.index(greeting) if greeting in greetings and len(bells) == 1 else None
        if follower is not None and follower not in self._peers:
            self._peers[follower], self._bells[follower] = guest, bells[0]
            self._watch.add(guest)
            return
        guest.close()
        for bell in bells:
            os.close(bell)
        if follower is not None:
            raise FrameError(f"a second follower {follower} came to {self._path}")
        if greeting:
            self._stray = f", and somebody who said {greeting!r}"

    def _welcome(self) -> None:
        """Hand out the memory."""
        try:
            memory = create(self._options.send_buffer, self._count)
        except OSError as error:
            raise TransportError(f"cannot share {self._options.send_buffer} bytes: {error}") from error
        try:
            self._ring = RingWriter(memory, self._count)
            for follower, peer in self._peers.items():
                try:
                    socket.send_fds(peer, [WELCOME], [memory, self._watch.bell])
                except OSError as error:
                    raise PeerLost(f"follower {follower} of {self._path} has gone") from error
        finally:
            os.close(memory)

    def _write(self, ring: RingWriter, message: bytes, several: bool, deadline: float) -> None:
        end = 0
        while True:
            if not ring.has_room():
                self._await_room(ring, deadline)
            end = ring.write(message, end, several)
            if ring.unpublished >= PIECE:
                self._publish(ring)
            if end == len(message):
                return

    def _await_room(self, ring: RingWriter, deadline: float) -> None:
        self._publish(ring)
        ring.want_room()
        while not ring.has_room():
            late = f"follower {ring.slowest()} of {self._path} is {self._options.send_buffer} bytes behind"
            self._check(self._watch.wait(deadline, late, BREATH))

    def _publish(self, ring: RingWriter) -> None:
        ring.publish()
        for bell in self._bells.values():
            os.eventfd_write(bell, 1)

    def _check(self, found: Sequence[int]) -> None:
        """Raise PeerLost if there is something at a follower's socket."""
        for follower, peer in self._peers.items():
            if peer.fileno() in found:
                raise PeerLost(f"follower {follower} of {self._path} has gone")

    def _leave_door(self) -> None:
        for descriptor in list(self._guests):
            self._take_out(descriptor).close()
        if self._door.fileno() >= 0:
            self._path.unlink(missing_ok=True)  # while the socket is open: afterwards it may be somebody else's
        self._door.close()


class ShmFanoutReceiver(FanoutReceiver):
    """A follower's end."""

    def __init__(self, options: ShmOptions, path: Path, follower: int, followers: int) -> None:
        self._path = path
        self._follower = follower
        self._followers = followers
        self._spin = options.spin / 1e6
        self._came_soon = False
        self._frames: deque[bytes] = deque()
        self._is_lost = False
        self._ring: RingReader | None = None
        self._bell = -1
        self._watch = Watch()
        self._leader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def connect(self, deadline: float) -> None:
        """Find the leader, and wait until it shares the memory."""
        with self._watch:
            self._dial(deadline)
            try:
                socket.send_fds(self._leader, [_greeting(self._follower, self._followers)], [self._watch.bell])
                self._watch.add(self._leader)
                while not self._watch.wait(deadline, f"not all followers came to {self._path}"):
                    pass
                token, shared, _, _ = socket.recv_fds(self._leader, len(WELCOME), 2)
            except ConnectionError as error:
                raise PeerLost(f"the leader at {self._path} has gone") from error
            if token != WELCOME:
                raise PeerLost(f"the leader at {self._path} has given up")
            memory, self._bell = shared
            if _cores(self._leader) == 1:
                self._spin = 0.0
            try:
                self._ring = RingReader(memory, self._followers, self._follower, self._bell)
            finally:
                os.close(memory)

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        """Copy exactly ``count`` frames out of the ring."""
        with self._watch:
            ring = self._ring
            assert ring is not None, "connect() comes first"
            frames = self._frames
            while len(frames) < count:
                message = ring.next()
                if message is not None:
                    frames.extend(_frames(*message))
                elif self._is_lost:
                    raise PeerLost(f"the leader at {self._path} has gone")
                else:
                    self._wait(ring, deadline, f"{len(frames)} of {count} frames came by {self._path}")
            return take(frames, count)

    def close(self) -> None:
        """Leave, which the leader notices."""
        if not self._watch.shut():
            return
        self._leader.close()
        if self._ring is not None:
            self._ring.close()
            os.close(self._bell)

    def _dial(self, deadline: float) -> None:
        while not dial(self._leader, self._path):
            self._watch.wait(deadline, f"no leader came to {self._path}", ATTEMPTS)

    def _wait(self, ring: RingReader, deadline: float, late: str) -> None:
        """Look for a moment, if that helped the last time, and then sleep; until something comes or the leader goes."""
        begun = time.monotonic()
        if self._came_soon:
            while not ring.has_more() and time.monotonic() < begun + self._spin:
                pass
        self._came_soon = False
        while not ring.has_more() and not self._is_lost:
            self._is_lost = bool(self._watch.wait(deadline, late))
        self._came_soon = time.monotonic() < begun + self._spin


def _cores(peer: socket.socket) -> int:
    """How many cores this process and its peer may use together: who looks on the only one keeps the peer off it."""
    pid, _, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    cores = os.sched_getaffinity(0)
    with suppress(OSError):  # it has left, or cannot be seen from here
        cores |= os.sched_getaffinity(pid)
    return len(cores)


def _greeting(follower: int, followers: int) -> bytes:
    return GREETING.pack(MAGIC, follower, followers)


def _message(frames: Sequence[bytes]) -> tuple[bytes, bool]:
    """One message of these frames, and whether they are several."""
    if len(frames) == 1:
        return frames[0], False
    header, body = pack(NO_MARK, frames)
    return b"".join((WORD.pack(len(header)), header, body)), True


def _frames(message: bytes, several: bool) -> Sequence[bytes]:
    if not several:
        return (message,)
    end = WORD.size + WORD.unpack_from(message)[0]
    _, frames = unpack(message[WORD.size : end], message[end:])
    return frames
