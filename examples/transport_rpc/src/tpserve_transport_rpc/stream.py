"""A socket under an RPyC connection that keeps deadlines: RPyC's own waits without end for room to write."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from urllib.parse import urlsplit

from rpyc import SocketStream
from rpyc.lib import Timeout

from tpserve.api import Closed, DeadlineExceeded, TransportError
from tpserve.api.addresses import check_address, ipc_path, taking
from tpserve.api.doors import dial

__all__ = ["SLICE", "Stream", "connected", "listening", "path_of"]

SLICE = 0.2
"""Seconds after which a wait looks whether its end was closed, or somebody else has gone."""


class Stream(SocketStream):  # type: ignore[misc]
    """One connection.

    Args:
        end: its socket.
        peer: what errors call the other side.

    Attributes:
        deadline: until when writing may wait.
        is_closing: whether somebody wants to close it, and nobody should wait any more.
        look: called after each slice of a wait; what it raises ends that.
    """

    def __init__(self, end: socket.socket, peer: str) -> None:
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(end)
        self.deadline = 0.0
        self._peer = peer
        self.is_closing = False
        self.look: Callable[[], None] = lambda: None

    def write(self, data: bytes) -> None:
        """Write all of it.

        Raises:
            DeadlineExceeded: some may have been written: the connection can only be closed.
            Closed: the same, because it is to be closed.
            EOFError: the other side has gone.
        """
        rest = memoryview(data)
        while rest:
            remaining = self.deadline - time.monotonic()
            try:
                self.sock.settimeout(min(SLICE, max(0.001, remaining)))
                rest = rest[self.sock.send(rest) :]
            except TimeoutError:
                self.check_waiting(remaining, f"{self._peer} made no room for {len(rest)} bytes")
            except OSError as error:
                raise EOFError(error) from error

    def poll(self, timeout: Timeout | float | None) -> bool:
        """Whether there is something to read; False after a slice of the timeout already, if that is finite."""
        seconds = Timeout(timeout).timeleft()
        found = bool(super().poll(seconds and min(seconds, SLICE)))
        if seconds and not found:
            self.look()
        return found

    def check_waiting(self, remaining: float, late: str) -> None:
        """See whether to wait on, after a slice in vain.

        Raises:
            DeadlineExceeded: no time remained.
            Closed: it is to be closed.
        """
        if self.is_closing:
            raise Closed("the fan-out was closed")
        self.look()
        if remaining <= 0:
            raise DeadlineExceeded(late)

    def has_ended(self) -> bool:
        """Whether the other side has gone, though what it sent may still be unread."""
        if self.closed:
            return True
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def interrupt(self) -> None:
        """Wake a thread that reads or writes; what was sent before still arrives."""
        if not self.closed:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


def listening(address: str, backlog: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        TransportError: the address is taken, malformed or too long.
    """
    try:
        family, place = _place(address)
        path = path_of(address)
        door = socket.socket(family, socket.SOCK_STREAM)
        try:
            if path is None:
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with taking(path) if path is not None else nullcontext():
                door.bind(place)
                door.listen(backlog)
        except BaseException:
            door.close()
            raise
    except OSError as error:
        raise TransportError(f"cannot listen at {address}: {error}") from error
    return door


def connected(address: str, deadline: float) -> socket.socket | None:
    """A socket connected to who listens at an address; None if nobody does, or has room, for a slice of the time.

    Raises:
        TransportError: the address is malformed or too long.
    """
    family, place = _place(address)
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        if _is_connected(end, place, min(SLICE, max(0.001, deadline - time.monotonic()))):
            return end
    except BaseException:
        end.close()
        raise
    end.close()
    return None


def _is_connected(end: socket.socket, place: str | tuple[str, int], seconds: float) -> bool:
    if isinstance(place, str):
        return dial(end, place)
    end.settimeout(seconds)
    try:
        end.connect(place)
    except OSError:
        return False
    end.settimeout(None)
    return True


def path_of(address: str) -> Path | None:
    """The path of an ``ipc`` address; None of others."""
    return ipc_path(address) if check_address(address).startswith("ipc://") else None


def _place(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """What the socket module calls it."""
    path = path_of(address)
    if path is not None:
        return socket.AF_UNIX, str(path)
    parts = urlsplit(address)
    assert parts.hostname, "the address was checked"
    assert parts.port, "the address was checked"
    return socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET, (parts.hostname, parts.port)
