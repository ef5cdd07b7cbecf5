"""The two nng sockets that links are made of: one end of a pair, and one that binds for many.

What nng does with messages that wait was found by trying. A pair socket reads its connections into a queue of its own,
up to 8,192 messages, whether anybody takes them or not; it keeps them when the peer goes, and reads what the kernel
still holds. But closing a socket throws away its sending queue. So that queue is kept short, and before a sender closes
it pushes FILLER behind the last real message until that must have left.

Each attempt of nng's to connect takes over a millisecond of CPU time. So who dials looks himself whether somebody
listens, which takes a few microseconds, and lets nng connect when that is so.

When a connection breaks, messages on the wire are lost, and nng would connect again and send what comes after them. So
one end of a pair takes a single connection and turns away every other; and who has dialled dials no more once he has
seen that, for another receiver may come, who would hear a sender of the one before.

A pair may also be given a connection that is there (nng's transport ``socket``), and speaks over it as over one of its
own. But it does not tell of a handshake that comes to nothing; and if its socket is closed at the instant in which one
ends, it forgets the connection and leaves it open, as it does its own: who listens gives handshakes a moment first.

Messages are received as nng's own (``recv_msg``): pynng's ``recv`` copies once more, and fails on empty ones.
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket as kernel
import time
from collections.abc import Callable
from threading import Event, Lock
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pynng
from pynng.exceptions import check_err

from tpserve.api import Closed, DeadlineExceeded, PeerLost, TransportError
from tpserve.api.addresses import ipc_path, taking

__all__ = ["ATTEMPTS", "FILLER", "SLICE", "ManySocket", "PairSocket", "has_left"]

Result = TypeVar("Result")

FILLER = b"-"
# How late a call that waits notices that its peer has gone.
SLICE = 0.2
ATTEMPTS = 0.02
CALM = 0.1
RECONNECT = 20
LONGEST_RECONNECT = 1000
SEND_QUEUE = 16
RECEIVE_QUEUE = 8192


class Socket:
    """What both have. nng allows :meth:`close` from another thread, and wakes who waits."""

    def __init__(self, socket: Any, address: str, largest: int = 0) -> None:
        self.address = address
        self._socket = socket
        self._socket.recv_max_size = largest
        self._socket.recv_buffer_size = RECEIVE_QUEUE
        self._socket.send_buffer_size = SEND_QUEUE
        self._timeouts = {"recv_timeout": -1, "send_timeout": -1}
        self._closed = False

    def close(self) -> None:
        """Close; what the sending queue holds is lost."""
        self._closed = True
        self._socket.close()

    def check_open(self) -> None:
        """Raise Closed after :meth:`close`."""
        if self._closed:
            raise Closed("the link was closed")

    def receive_message(self, deadline: float) -> Any | None:
        """One pynng.Message; None when the deadline, or a slice of the time until then, has passed.

        Raises:
            Closed: :meth:`close` was called.
        """
        return self._attempt(self._socket.recv_msg, "recv_timeout", deadline)

    def _attempt(self, call: Callable[[bool], Result], timeout: str, deadline: float) -> Result | None:
        """Call with a time-out that ends with the deadline, or after a slice; None if it ran out."""
        self.check_open()
        wait = _milliseconds(deadline)
        if wait and wait != self._timeouts[timeout]:
            setattr(self._socket, timeout, wait)
            self._timeouts[timeout] = wait
        try:
            return call(wait > 0)
        except (pynng.Timeout, pynng.TryAgain):
            return None
        except pynng.Closed as error:
            raise Closed("the link was closed") from error


class PairSocket(Socket):
    """One end of a connection between two: :meth:`dial` or :meth:`adopt` comes first.

    Args:
        socket: a pynng.Pair0 or Pair1.
        address: where to dial, or where the connection was made.
        peer: what errors call the other end.
        largest: bytes of a message; who sends a larger one is cut off. Any, if 0.
    """

    def __init__(self, socket: Any, address: str, peer: str, largest: int = 0) -> None:
        super().__init__(socket, address, largest)
        self.peer = peer
        self._dialer: Any = None
        self._has_hung_up = False
        self._has_connection = False
        self._came = Event()
        self._left = Event()
        self._closing = Lock()
        socket.add_pre_pipe_connect_cb(self._take_first)
        socket.add_post_pipe_connect_cb(lambda _: self._came.set())
        socket.add_post_pipe_remove_cb(lambda _: self._left.set())
        socket.reconnect_time_min, socket.reconnect_time_max = RECONNECT, LONGEST_RECONNECT

    def adopt(self, end: kernel.socket, deadline: float) -> None:
        """Take over a connection, which nng closes, and wait until the peer has done so too.

        Raises:
            DeadlineExceeded: it has not.
            PeerLost: it has gone.
            Closed: :meth:`close` was called.
        """
        with self._closing, end.dup() as watched:
            self._take_over(end)
            while not self._came.wait(_seconds(deadline)):
                self.check_open()
                # What it sent before it went may be on its way through nng.
                if has_left(watched) and not self._came.wait(SLICE):
                    raise PeerLost(f"{self.peer} has gone")
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"{self.peer} does not answer")

    def close(self) -> None:
        """Close, once :meth:`adopt` has ended, which it does now; what the sending queue holds is lost."""
        self._closed = True
        with self._closing:
            super().close()

    def dial(self, deadline: float) -> None:
        """Wait until somebody listens, and begin to connect.

        Raises:
            DeadlineExceeded: nobody does.
            TransportError: nobody can, as when the path is too long.
            Closed: :meth:`close` was called.
        """
        if self._dialer is not None:
            return
        while not self.has_listener(deadline):
            self.check_open()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"nobody came to {self.address}")
            time.sleep(ATTEMPTS)
        try:
            self._dialer = self._socket.dial(self.address, block=False)
        except pynng.Closed as error:
            raise Closed("the link was closed") from error
        except pynng.NNGException as error:
            raise TransportError(f"cannot dial {self.address}: {error}") from error

    def has_listener(self, deadline: float) -> bool:
        """Whether somebody listens where this end dials."""
        if not self.address.startswith("ipc://"):
            parts = urlsplit(self.address)
            try:
                kernel.create_connection((parts.hostname, parts.port), max(ATTEMPTS, _seconds(deadline))).close()
            except OSError:
                return False
            return True
        with kernel.socket(kernel.AF_UNIX, kernel.SOCK_DGRAM) as probe:
            # A stream socket that is alive refuses one of another type in other words, and hears nothing of it.
            try:
                return probe.connect_ex(str(ipc_path(self.address))) == errno.EPROTOTYPE
            except OSError as error:
                raise TransportError(f"cannot dial {self.address}: {error}") from error

    def connected(self, deadline: float) -> bool:
        """Whether the peer has come; waits for it, at most for a slice of the time until the deadline.

        Raises:
            Closed: :meth:`close` was called.
        """
        self.check_open()
        return self._came.wait(_seconds(deadline))

    @property
    def lost(self) -> bool:
        """Whether the peer was there and has gone; it does not come back."""
        return self._left.is_set() and not self._closed

    def check_peer(self) -> None:
        """Raise PeerLost if the peer was there and has gone."""
        if not self.lost:
            return
        # Not as soon as it goes, in pynng's callback: that holds a lock for which a callback waits that this waits for.
        if self._dialer is not None and not self._has_hung_up:
            with self._closing:  # nng ends the process if its socket, too, is closed meanwhile
                if not self._closed:
                    self._has_hung_up = True
                    with contextlib.suppress(pynng.NNGException):
                        self._dialer.close()
        raise PeerLost(f"{self.peer} has gone")

    def receive(self, deadline: float) -> bytes | None:
        """One message; None when the deadline, or a slice of the time until then, has passed."""
        message = self.receive_message(deadline)
        if message is None:
            return None
        data: bytes = message.bytes
        return data

    def try_send(self, data: bytes, deadline: float) -> bool:
        """Send one message; False when the sending queue is full until the deadline, or for a slice of that time.

        Raises:
            PeerLost: the peer has gone.
            Closed: :meth:`close` was called.
        """
        self.check_peer()

        def send(wait: bool) -> bool:
            self._socket.send(data, wait)
            return True

        return self._attempt(send, "send_timeout", deadline) is not None

    def send(self, data: bytes, deadline: float) -> None:
        """Send one message, when the sending queue has room.

        Raises:
            DeadlineExceeded: it stayed full; the message was not sent.
            PeerLost: the peer has gone.
            Closed: :meth:`close` was called.
        """
        while not self.try_send(data, deadline):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self.peer} does not read")

    def flush(self, deadline: float) -> None:
        """Wait until all that was sent has left the sending queue, or the deadline has passed."""
        if self._closed or not self._came.is_set():
            return
        with contextlib.suppress(DeadlineExceeded, PeerLost, Closed):
            for _ in range(SEND_QUEUE + 1):
                self.send(FILLER, deadline)

    def _take_over(self, end: kernel.socket) -> None:
        self.check_open()
        try:
            listener = self._socket.listen("socket://").listener
            check_err(pynng.lib.nng_listener_set_int(listener, b"socket:fd", end.fileno()))
        except pynng.Closed as error:
            raise Closed("the link was closed") from error
        except pynng.NNGException as error:
            raise TransportError(f"cannot give nng a connection with {self.peer}: {error}") from error
        end.detach()

    def _take_first(self, pipe: Any) -> None:
        """Turn away a second connection, before anything passes over it."""
        if self._has_connection:
            pipe.close()
        self._has_connection = True


class ManySocket(Socket):
    """The binding end for any number of PairSockets over Pair1.

    Args:
        address: where to listen.

    Raises:
        TransportError: the address is taken, malformed or too long.
    """

    def __init__(self, address: str) -> None:
        socket = pynng.Pair1(polyamorous=True)
        super().__init__(socket, address)
        try:
            # nng itself takes the path of anything that nobody listens at
            with taking(ipc_path(address)) if address.startswith("ipc://") else contextlib.nullcontext():
                socket.listen(address)
        except (pynng.NNGException, TransportError) as error:
            self.close()
            raise TransportError(f"cannot listen at {address}: {error}") from error

    def close(self) -> None:
        """Close, a moment later, for nng forgets the connections of who is just coming or going."""
        if not self._closed:
            self._closed = True
            time.sleep(CALM)
        super().close()

    def connection(self, message: Any) -> int:
        """The number of the connection that a message came over, which may have gone; no two have the same."""
        return int(message.pipe.id) if message.pipe is not None else 0

    def turn_away(self, message: Any) -> None:
        """Close the connection that a message came over."""
        if message.pipe is not None:
            with contextlib.suppress(pynng.NNGException):  # it has gone
                message.pipe.close()

    def answer(self, message: Any, data: bytes) -> None:
        """Send to where a message came from, if that is still there. nng drops it when too much waits there."""
        if message.pipe is not None:
            with contextlib.suppress(pynng.NNGException):
                message.pipe.send(data)


def has_left(end: kernel.socket) -> bool:
    """Whether the other side of a connection has gone, though what it sent may still be unread."""
    events = select.poll()
    events.register(end, select.POLLRDHUP)
    return bool(events.poll(0))


def _seconds(deadline: float) -> float:
    return max(0.0, min(SLICE, deadline - time.monotonic()))


def _milliseconds(deadline: float) -> int:
    return math.ceil(1000 * _seconds(deadline))
