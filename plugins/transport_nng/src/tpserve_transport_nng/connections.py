"""Connections of the kernel's, as they are before nng is given them."""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from tpserve.api import TransportError
from tpserve.api.addresses import check_address, ipc_path, taking
from tpserve.api.doors import dial

__all__ = ["ATTEMPTS", "SLICE", "Listener", "connected", "has_left", "hurry"]

SLICE = 0.2
"""Seconds within which a call that waits notices that its peer has gone."""

ATTEMPTS = 0.02
"""Seconds between attempts to connect to where nobody listens yet."""

ANY_HOST = "*"


class Listener:
    """A socket that others come to; it keeps its address until it is shut, by whichever thread.

    Args:
        address: where to listen.

    Raises:
        TransportError: the address is taken, malformed or too long.
    """

    def __init__(self, address: str) -> None:
        self._address = check_address(address)
        self._is_shut = False
        self._lock = Lock()
        self.socket = _listening(address)

    def shut(self) -> None:
        """Leave the address, and wake who waits at it."""
        with self._lock:
            if self._is_shut:
                return
            self._is_shut = True
            if self.socket.family == socket.AF_UNIX:
                ipc_path(self._address).unlink(missing_ok=True)
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut it, and close the socket."""
        self.shut()
        self.socket.close()


def connected(address: str, deadline: float) -> socket.socket | None:
    """A socket connected to who listens at an address; None if nobody does, or has room.

    Raises:
        TransportError: nobody can listen there, as when the path is too long.
    """
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
            hurry(end)
            stack.pop_all()
            return end
    return None


def hurry(end: socket.socket) -> None:
    """Have small messages sent at once, as nng has its own sockets."""
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def has_left(end: socket.socket) -> bool:
    """Whether the other side of a connection has gone, though what it sent may still be unread."""
    events = select.poll()
    events.register(end, select.POLLRDHUP)
    return bool(events.poll(0))


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


def _place(address: str) -> tuple[int, Any]:
    """The family of an address, and what the socket module calls it."""
    if address.startswith("ipc://"):
        return socket.AF_UNIX, str(ipc_path(address))
    parts = urlsplit(address)
    host = None if parts.hostname == ANY_HOST else parts.hostname
    family, _, _, _, place = socket.getaddrinfo(host, parts.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return family, place
