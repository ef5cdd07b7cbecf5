"""Where a fan-out meets: the leader's door, and the followers who come to it.

The door is a socket of the kernel's. One of nng's lets in whoever speaks nng's protocol, and a pair has a single place:
who takes it and is silent holds up a follower. At the door a follower says which it is; who says anything else is sent
away, and who says nothing is in nobody's way. When all have come the leader answers READY, and from then on nng has the
connections that were made here (:meth:`PairSocket.adopt`), so that there is no other place to come to.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from tpserve.api import Closed, DeadlineExceeded, FrameError, PeerLost, TransportError
from tpserve.api.addresses import check_address, ipc_path, taking
from tpserve.api.doors import dial, greetings
from tpserve_transport_nng.sockets import ATTEMPTS, SLICE, has_left

__all__ = ["READY", "Door", "Visit", "greeting"]

READY = b"tpserve nng fan-out 2: ready"


def greeting(follower: int, followers: int) -> bytes:
    """What a follower says at the door; all are of one length."""
    return b"tpserve nng fan-out 2: follower %8d of %8d" % (follower, followers)


class Door:
    """The leader's, which keeps its address until it is closed, by whichever thread.

    Args:
        address: where to listen.
        followers: how many are to come.

    Raises:
        TransportError: the address is taken, malformed or too long.
    """

    def __init__(self, address: str, followers: int) -> None:
        self._address = check_address(address)
        self._followers = followers
        self._came: dict[int, socket.socket] = {}
        self._stray = ""
        self._closed = False
        self._door = _listening(address)

    @contextmanager
    def meeting(self, deadline: float) -> Iterator[list[socket.socket]]:
        """Wait until all have come, and yield the connections with them, in their order; closed in the end.

        Raises:
            DeadlineExceeded: not all came.
            PeerLost: one that came has gone.
            FrameError: one came twice.
            Closed: :meth:`close` was called.
        """
        with ExitStack() as ends:
            try:
                self._greet(ends, deadline)
            except TransportError:
                raise
            except OSError as error:
                self._look()
                raise TransportError(f"cannot let anybody in at {self._address}: {error}") from error
            yield [self._came[follower] for follower in range(self._followers)]

    def close(self) -> None:
        """Leave the address, and end a meeting that waits."""
        if self._closed:
            return
        self._closed = True
        if self._door.family == socket.AF_UNIX:
            ipc_path(self._address).unlink(missing_ok=True)
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _greet(self, ends: ExitStack, deadline: float) -> None:
        expected = {greeting(follower, self._followers): follower for follower in range(self._followers)}
        size = len(greeting(0, 1))
        with closing(greetings(self._door, size, deadline, self._late, self._look)) as guests:
            while len(self._came) < self._followers:
                guest, said = next(guests)
                follower = expected.get(said)
                if follower is None:
                    guest.close()
                    self._stray = f", and somebody who said {said!r}"
                    continue
                ends.enter_context(guest)
                if follower in self._came:
                    raise FrameError(f"a second follower {follower} came to {self._address}")
                _hurry(guest)
                self._came[follower] = guest

    def _late(self) -> str:
        return f"{len(self._came)} of {self._followers} followers came to {self._address}{self._stray}"

    def _look(self) -> None:
        """See that nothing has happened for which nobody is to be waited for."""
        if self._closed:
            raise Closed("the fan-out was closed")
        for follower, end in self._came.items():
            if has_left(end):
                raise PeerLost(f"follower {follower} of {self._address} has gone")


class Visit:
    """A follower's, to the leader's door.

    Args:
        address: where the door is.
        follower: which follower it is.
        followers: of how many.
        look: called several times a second while it waits; what it raises ends that.
    """

    def __init__(self, address: str, follower: int, followers: int, look: Callable[[], None]) -> None:
        self._address = check_address(address)
        self._follower = f"follower {follower} of {followers}"
        self._greeting = greeting(follower, followers)
        self._look = look
        self._leader: socket.socket | None = None
        self._lock = Lock()

    @contextmanager
    def meeting(self, deadline: float) -> Iterator[socket.socket]:
        """Wait until there is a leader and all have come to it, and yield the connection.

        Who gives up stays until it is closed, so that a leader who waits for others knows that it had come.

        Raises:
            DeadlineExceeded: there is no leader, or not all came.
            PeerLost: it has gone, or has sent this follower away.
            FrameError: who listens there is no leader.
            TransportError: nobody can listen there, as when the path is too long.
        """
        with self._lock:
            self._leader = leader = self._dialled(deadline)
            try:
                leader.sendall(self._greeting)
                answer = self._heard(leader, deadline)
            except ConnectionError as error:
                raise PeerLost(f"the leader at {self._address} has gone") from error
            if not answer:
                raise PeerLost(f"the leader at {self._address} has gone, or does not expect {self._follower}")
            if answer != READY:
                raise FrameError(f"expected a leader's greeting at {self._address}, found {answer!r}")
            yield leader

    def close(self) -> None:
        """Leave, once ``look`` has ended a meeting that waits."""
        with self._lock:
            if self._leader is not None:
                self._leader.close()

    def _dialled(self, deadline: float) -> socket.socket:
        while True:
            self._look()
            leader = _connected(self._address, deadline)
            if leader is not None:
                _hurry(leader)
                return leader
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"no leader came to {self._address}")
            time.sleep(ATTEMPTS)

    def _heard(self, leader: socket.socket, deadline: float) -> bytes:
        """What the leader says; less than READY, or nothing, if it leaves."""
        events = select.poll()
        events.register(leader, select.POLLIN)
        heard = b""
        while len(heard) < len(READY):
            is_heard = events.poll(1000 * max(0.0, min(deadline - time.monotonic(), SLICE)))
            more = leader.recv(len(READY) - len(heard)) if is_heard else b""
            heard += more
            if not more:
                self._look()
                if time.monotonic() >= deadline:  # at which a leader may have given up, too
                    raise DeadlineExceeded(f"not all followers came to {self._address}")
                if is_heard:
                    break
        return heard


def _listening(address: str) -> socket.socket:
    try:
        family, place = _place(address)
        with ExitStack() as stack:
            door = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with taking(Path(place)) if family == socket.AF_UNIX else nullcontext():
                door.bind(place)
                door.listen()
            stack.pop_all()
            return door
    except OSError as error:
        raise TransportError(f"cannot listen at {address}: {error}") from error


def _connected(address: str, deadline: float) -> socket.socket | None:
    """A socket connected to who listens at an address; None if nobody does, or has room."""
    with ExitStack() as stack, suppress(OSError):
        family, place = _place(address)
        end = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        if family == socket.AF_UNIX:
            is_there = dial(end, place)
        else:
            end.settimeout(min(SLICE, max(ATTEMPTS, deadline - time.monotonic())))
            end.connect(place)
            is_there = end.getsockname() != end.getpeername()  # its own port may just be the one that it dials
        if is_there:
            end.settimeout(None)
            stack.pop_all()
            return end
    return None


def _hurry(end: socket.socket) -> None:
    """Have small messages sent at once, as nng has its own sockets."""
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _place(address: str) -> tuple[int, Any]:
    """The family of an address, and what the socket module calls it."""
    if address.startswith("ipc://"):
        return socket.AF_UNIX, str(ipc_path(address))
    parts = urlsplit(address)
    family, _, _, _, place = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)[0]
    return family, place
