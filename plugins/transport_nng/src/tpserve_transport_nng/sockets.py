"""The two nng sockets that links are made of: one end of a pair, and one for many connections.

What nng does with messages that wait was found by trying. A pair socket reads its connections into a queue of its own,
up to 8,192 messages, whether anybody takes them or not; it keeps them when the peer goes, and reads what the kernel
still holds. But closing a socket throws away its sending queue. So that queue is kept short, and before a sender closes
it pushes FILLER behind the last real message until that must have left. And who writes to a peer that has gone reads
no more of what that had sent: so a sender that is owed marks takes them before it closes
(:mod:`tpserve_transport_nng.marked`).

The connections are made before (:mod:`tpserve_transport_nng.door`), and given to nng (its transport ``socket``), each
to a listener of its own: one that has two to take loses the second. So nng never connects again by itself when one
breaks: messages on the wire are lost then, and those after them would come.

A call that begins while its socket is being closed uses what nng frees, which ends the process, or never returns: a
close waits until all calls have ended. And a socket that is closed at the instant in which a handshake ends leaves that
connection open: a close waits a moment for those that are under way.

Messages are taken from nng itself: pynng's ``recv`` copies once more, and fails on empty ones; its ``recv_msg`` keeps
something for each connection that has gone.
"""

from __future__ import annotations

import contextlib
import math
import socket as kernel
import time
from collections import deque
from collections.abc import Callable
from threading import Event
from typing import Any, NamedTuple, TypeVar

import pynng
from pynng import ffi, lib
from pynng.exceptions import check_err

from tpserve.api import Closed, DeadlineExceeded, PeerLost, TransportError
from tpserve_transport_nng.calls import Calls
from tpserve_transport_nng.connections import SLICE, has_left

__all__ = ["FILLER", "ManySocket", "PairSocket"]

Result = TypeVar("Result")

FILLER = b"-"
CALM = 0.2
BREATH = 0.01
SEND_QUEUE = 16
RECEIVE_QUEUE = 8192


class Message(NamedTuple):
    """One that came.

    Attributes:
        pipe: nng's name for the connection that it came by.
    """

    data: bytes
    pipe: Any


class Socket:
    """What both have. :meth:`close` may be called from another thread; who waits hears of it in a fifth of a second.

    Args:
        socket: a pynng socket.
        address: where its connections are made.
        largest: bytes of a message; who sends a larger one is cut off. Any, if 0.
    """

    def __init__(self, socket: Any, address: str, largest: int = 0) -> None:
        self.address = address
        self._socket = socket
        self._socket.recv_max_size = largest
        self._socket.recv_buffer_size = RECEIVE_QUEUE
        self._socket.send_buffer_size = SEND_QUEUE
        self._timeouts = {"recv_timeout": -1, "send_timeout": -1}
        self._calls = Calls()

    def close(self) -> None:
        """Close; what the sending queue holds is lost."""
        self._calls.end()
        self._socket.close()

    def check_open(self) -> None:
        """Raise Closed after :meth:`close`."""
        self._calls.check_open()

    def receive_message(self, deadline: float) -> Message | None:
        """One message; None when the deadline, or a slice of the time until then, has passed.

        Raises:
            Closed: :meth:`close` was called.
        """
        return self._attempt(self._receive, "recv_timeout", deadline)

    def _attempt(self, call: Callable[[bool], Result], timeout: str, deadline: float) -> Result | None:
        """Call with a time-out that ends with the deadline, or after a slice; None if it ran out."""
        wait = _milliseconds(deadline)
        with self._calls:
            if wait and wait != self._timeouts[timeout]:
                setattr(self._socket, timeout, wait)
                self._timeouts[timeout] = wait
            try:
                return call(wait > 0)
            except (pynng.Timeout, pynng.TryAgain):
                return None

    def _receive(self, wait: bool) -> Message:
        place = ffi.new("nng_msg **")
        check_err(lib.nng_recvmsg(self._socket.socket, place, 0 if wait else lib.NNG_FLAG_NONBLOCK))
        message = place[0]
        try:
            data = bytes(ffi.buffer(lib.nng_msg_body(message), lib.nng_msg_len(message)))
            return Message(data, lib.nng_msg_get_pipe(message))
        finally:
            lib.nng_msg_free(message)

    def _give(self, end: kernel.socket) -> None:
        """Let nng have a connection, and close it."""
        try:
            listener = self._socket.listen("socket://").listener
            check_err(lib.nng_listener_set_int(listener, b"socket:fd", end.fileno()))
        except pynng.NNGException as error:
            raise TransportError(f"cannot give nng a connection at {self.address}: {error}") from error
        end.detach()


class PairSocket(Socket):
    """One end of a connection between two: :meth:`adopt` and :meth:`meet` come first.

    Args:
        socket: a pynng.Pair0 or Pair1.
        address: where the connection is made.
        peer: what errors call the other end.
        largest: bytes of a message; who sends a larger one is cut off. Any, if 0.
    """

    def __init__(self, socket: Any, address: str, peer: str, largest: int = 0) -> None:
        super().__init__(socket, address, largest)
        self.peer = peer
        self._adopted_at = -math.inf
        self._watched: kernel.socket | None = None
        self._came = Event()
        self._left = Event()
        socket.add_post_pipe_connect_cb(lambda _: self._came.set())
        socket.add_post_pipe_remove_cb(lambda _: self._left.set())

    def adopt(self, end: kernel.socket) -> None:
        """Take over a connection, which nng closes then; :meth:`meet` waits until the peer has done so too.

        Raises:
            Closed: :meth:`close` was called.
        """
        with self._calls:
            try:
                self._watched = end.dup()
            except OSError as error:
                raise TransportError(f"cannot watch {self.peer}: {error}") from error
            self._give(end)
            self._adopted_at = time.monotonic()

    def meet(self, deadline: float) -> None:
        """Wait until the peer, too, has taken the connection over.

        Raises:
            DeadlineExceeded: it has not.
            PeerLost: it has gone.
            Closed: :meth:`close` was called.
        """
        while not self.has_met(deadline):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self.peer} does not answer")

    def has_met(self, deadline: float) -> bool:
        """Whether it has, now or within a slice of the time until the deadline; raises what :meth:`meet` does."""
        has_met = self._came.wait(_seconds(deadline))
        with self._calls:
            assert self._watched is not None
            is_gone = not has_met and has_left(self._watched)
            if has_met:
                self._watched.close()  # nng tells of everything from now on
        # What it sent before it went may be on its way through nng.
        if is_gone and not self._came.wait(SLICE):
            raise PeerLost(f"{self.peer} has gone")
        return has_met

    def close(self) -> None:
        """Close, after a handshake that is under way; what the sending queue holds is lost."""
        self._calls.end()
        if self._watched is not None:
            self._came.wait(_remaining(self._adopted_at + CALM))
            self._watched.close()
        self._socket.close()

    @property
    def lost(self) -> bool:
        """Whether the peer was there and has gone; it does not come back."""
        return self._left.is_set() and not self._calls.closed

    def check_peer(self) -> None:
        """Raise PeerLost if the peer was there and has gone."""
        if self.lost:
            raise PeerLost(f"{self.peer} has gone")

    def receive(self, deadline: float) -> bytes | None:
        """One message; None when the deadline, or a slice of the time until then, has passed."""
        message = self.receive_message(deadline)
        return None if message is None else message.data

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

    def send(self, data: bytes, deadline: float, look: Callable[[], None] | None = None) -> None:
        """Send one message, when the sending queue has room.

        Args:
            data: the message.
            deadline: when to give up.
            look: called several times a second while there is no room; what it raises ends that.

        Raises:
            DeadlineExceeded: it stayed full; the message was not sent.
            PeerLost: the peer has gone.
            Closed: :meth:`close` was called.
        """
        while not self.try_send(data, deadline):
            if look is not None:
                look()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self.peer} does not read")

    def flush(self, deadline: float) -> None:
        """Wait until all that was sent has left the sending queue, or the deadline has passed."""
        if self._calls.closed or not self._came.is_set():
            return
        with contextlib.suppress(DeadlineExceeded, PeerLost, Closed):
            for _ in range(SEND_QUEUE + 1):
                self.send(FILLER, deadline)


class ManySocket(Socket):
    """The other end of any number of PairSockets over Pair1.

    Args:
        address: where their connections are made.
    """

    def __init__(self, address: str) -> None:
        super().__init__(pynng.Pair1(polyamorous=True), address)
        self._adopted = 0
        self._came = 0
        self._adopted_at = -math.inf
        self._unused: deque[Any] = deque()
        self._socket.add_post_pipe_connect_cb(self._note_who_came)
        self._socket.add_post_pipe_remove_cb(self._note_who_left)

    def adopt(self, end: kernel.socket) -> None:
        """Take over a connection, which nng closes then.

        Raises:
            Closed: :meth:`close` was called.
        """
        with self._calls:
            while self._unused:
                self._unused.popleft().close()
            self._give(end)
            self._adopted += 1
            self._adopted_at = time.monotonic()

    def close(self) -> None:
        """Close, after a handshake that has just begun."""
        self._calls.end()
        while self._came < self._adopted and _remaining(self._adopted_at + CALM):
            time.sleep(BREATH)
        self._socket.close()

    def answer(self, message: Message, data: bytes) -> None:
        """Send to where a message came from, if that is still there. nng drops it when too much waits there."""
        place = ffi.new("nng_msg **")
        with self._calls:
            check_err(lib.nng_msg_alloc(place, 0))
            answer = place[0]
            check_err(lib.nng_msg_append(answer, data, len(data)))
            lib.nng_msg_set_pipe(answer, message.pipe)
            if lib.nng_sendmsg(self._socket.socket, answer, 0):
                lib.nng_msg_free(answer)  # which is ours while it is not sent

    def _note_who_came(self, _: Any) -> None:
        self._came += 1  # pynng lets one callback run at a time

    def _note_who_left(self, pipe: Any) -> None:
        with contextlib.suppress(KeyError):  # the socket was closed
            self._unused.append(pipe.listener)


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _seconds(deadline: float) -> float:
    return min(SLICE, _remaining(deadline))


def _milliseconds(deadline: float) -> int:
    return math.ceil(1000 * _seconds(deadline))
