"""The two zmq sockets that links are made of: a ROUTER that binds and a DEALER that connects to it.

Their queues are unbounded because a window of bytes bounds what is in them, and strangers' messages never get there. So
zmq never stops reading a connection, and what a peer wrote before it closed always arrives.

When a connection breaks, messages on the wire are lost, and zmq connects again and sends what waits behind them. A
ROUTER gives each connection a name of its own, so that its owner can tell the second one from the first.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Self, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from tpserve.api import Closed, TransportError
from tpserve.api.addresses import check_address, ipc_path, taking
from tpserve_transport_zmq.doorkeeper import Context, introduce, require

__all__ = ["SHARED", "Dealer", "Part", "Router", "body_part"]

Part = bytes | zmq.Frame
Message = TypeVar("Message")

# A blocking recv answers in 50 µs where a poll over several sockets takes 80. That it returns now and then bounds
# how late a lost peer or a close from another thread is noticed, and costs nothing that shows.
SLICE = 0.2
RECONNECT = 20  # milliseconds between attempts
SHARED = 64 << 10
"""A larger body is copied into one zmq message that all receivers share."""


class Socket:
    """What both have. The thread inside ``with`` owns the socket; only :meth:`close` may come from another."""

    def __init__(self, context: Context, kind: int) -> None:
        self._socket = context.socket(kind)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.LINGER, 0)  # until close() says how long: an end that is forgotten waits for nobody
        self._lock = RLock()
        self._closed = False
        self._timeout = -1

    def __enter__(self) -> Self:
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise Closed("the link was closed")
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def close(self, linger: float) -> None:
        """Close; the context's end then waits up to ``linger`` seconds until what was sent has gone out."""
        self._closed = True
        with self._lock:
            self._socket.close(round(1000 * linger))

    def _receive(self, take: Callable[[], Message], deadline: float) -> Message | None:
        wait = _milliseconds(deadline)
        if wait != self._timeout:
            self._socket.setsockopt(zmq.RCVTIMEO, wait)
            self._timeout = wait
        try:
            return take()
        except zmq.Again:
            if self._closed:
                raise Closed("the link was closed") from None
            return None

    def _send(self, parts: tuple[Part, ...]) -> None:
        for part in parts[:-1]:
            self._socket.send(part, zmq.SNDMORE | zmq.DONTWAIT)
        last = parts[-1]
        self._socket.send(last, zmq.DONTWAIT, copy=not isinstance(last, zmq.Frame))


class Router(Socket):
    """Binds, and sends to the one of its connections that it names.

    Args:
        context: this process's zmq context, which has a Doorkeeper.
        address: where to bind.
        protocol: what those speak who may connect.
        largest: bytes of a part; who sends a larger one is cut off. Any, if negative.

    Raises:
        TransportError: the address is taken, malformed or too long.
    """

    def __init__(self, context: Context, address: str, protocol: bytes, largest: int = -1) -> None:
        file = ipc_path(address) if check_address(address).startswith("ipc://") else None
        super().__init__(context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, largest)
        require(self._socket, protocol)
        self._context = context
        self._departures: zmq.Socket[bytes] | None = None
        self._in_doubt = False
        self._file: Path | None = None
        try:
            with taking(file) if file is not None else nullcontext():  # zmq takes the path of a living socket away
                self._socket.bind(address)
        except TransportError:
            self.close(0)
            raise
        except zmq.ZMQError as error:
            self.close(0)
            raise TransportError(f"cannot bind {address}: {error}") from error
        self._file = file

    def receive(self, deadline: float) -> list[bytes] | None:
        """One message, after its sender's name; None when the deadline, or a slice of the time until then, has passed.

        Raises:
            Closed: :meth:`close` was called meanwhile.
        """
        return self._receive(self._socket.recv_multipart, deadline)

    def send(self, name: bytes, *parts: Part) -> bool:
        """Send a message over the connection of this name; False if it has gone. Never blocks."""
        try:
            self._send((name, *parts))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def somebody_left(self) -> bool:
        """Whether a peer may have gone since the last call: a message tells which. The first call begins to watch."""
        in_doubt, self._in_doubt = self._in_doubt, False
        if self._departures is None:
            self._departures = _watch(self._context, self._socket, zmq.EVENT_DISCONNECTED)
            self._in_doubt = True
        while int(self._departures.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            recv_monitor_message(self._departures)
            self._in_doubt = True  # the next time too: zmq tells a moment before it lets go of the connection
        return in_doubt or self._in_doubt

    def watch_no_more(self) -> None:
        """Let nobody be told of departures."""
        if self._departures is not None:
            self._socket.monitor(None, 0)
            self._departures.close(0)
            self._departures = None

    def close(self, linger: float) -> None:
        """Close, and remove the socket's file, which zmq leaves."""
        self._closed = True
        with self._lock:
            if self._file is not None:  # while the socket is open: afterwards it may be somebody else's
                self._file.unlink(missing_ok=True)
                self._file = None
            if not self._socket.closed:
                self.watch_no_more()
            super().close(linger)


class Dealer(Socket):
    """Connects to a Router, and knows when it has gone.

    Args:
        context: this process's zmq context.
        address: where to connect; the Router may come later.
        protocol: what the Router speaks.

    Raises:
        TransportError: the address is malformed.
    """

    def __init__(self, context: Context, address: str, protocol: bytes) -> None:
        check_address(address)
        super().__init__(context, zmq.DEALER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT)
        introduce(self._socket, protocol)
        self._events = _watch(context, self._socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._connected = False
        self._lost = False
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close(0)
            raise TransportError(f"cannot connect to {address}: {error}") from error

    def connected(self, deadline: float) -> bool:
        """Whether the connection has been made; waits for it, at most for a slice of the time until the deadline."""
        if not self._connected and self._events.poll(_milliseconds(deadline)):
            self._read_event()
        if self._closed:
            raise Closed("the link was closed")
        return self._connected

    def receive(self, deadline: float) -> bytes | None:
        """One part; None when the deadline, or a slice of the time until then, has passed.

        Part by part, since asking zmq whether there is another takes as long as receiving it.

        Raises:
            Closed: :meth:`close` was called meanwhile.
        """
        return self._receive(self._socket.recv, deadline)

    def look(self, seconds: float) -> bytes | None:
        """One part, if it comes so soon; without sleeping, which takes a good part of what a message takes."""
        stop = time.monotonic() + seconds
        while True:
            try:
                return self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                if time.monotonic() >= stop:
                    return None
                os.sched_yield()  # zmq's own thread may need this core

    def lost(self) -> bool:
        """Whether the peer was there and has gone; once it has, zmq's new attempts to connect do not change that."""
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._read_event()
        return self._lost

    def send(self, *parts: Part) -> None:
        """Send a message to the Router. Never blocks."""
        self._send(parts)

    def close(self, linger: float) -> None:
        """Close; a lost peer is not waited for."""
        self._closed = True
        with self._lock:
            if not self._socket.closed:
                linger = 0 if self.lost() else linger
                self._socket.monitor(None, 0)
                self._events.close(0)
            super().close(linger)

    def _read_event(self) -> None:
        match recv_monitor_message(self._events)["event"]:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            case zmq.EVENT_DISCONNECTED:
                self._lost = True


def body_part(body: bytes) -> Part:
    """A body as it is sent: a large one is copied once, however many receivers it has."""
    return zmq.Frame(body, copy=True) if len(body) > SHARED else body


def _watch(context: Context, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Tells of events. Its queue has no end, at which zmq's own thread would wait until somebody reads."""
    address = f"inproc://events-{socket.FD}"
    socket.monitor(address, events)
    watch = context.socket(zmq.PAIR)
    watch.setsockopt(zmq.RCVHWM, 0)
    watch.connect(address)
    return watch


def _milliseconds(deadline: float) -> int:
    return max(0, math.ceil(1000 * min(SLICE, deadline - time.monotonic())))
