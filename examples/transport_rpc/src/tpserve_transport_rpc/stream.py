"""A socket under an RPyC connection that keeps deadlines: RPyC's own waits without end for room to write."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from rpyc import SocketStream

from tpserve.api import DeadlineExceeded, TransportError
from tpserve.api.addresses import check_address, free_path, ipc_path

__all__ = ["Stream", "connected", "listening", "path_of"]

LONGEST = 3600.0


class Stream(SocketStream):  # type: ignore[misc]
    """One connection.

    Attributes:
        deadline: until when writing may wait.
    """

    def __init__(self, end: socket.socket) -> None:
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(end)
        self.deadline = 0.0

    def write(self, data: bytes) -> None:
        """Write all of it.

        Raises:
            DeadlineExceeded: some may have been written: the connection can only be closed.
            EOFError: the other side has gone.
        """
        rest = memoryview(data)
        try:
            while rest:
                self.sock.settimeout(min(LONGEST, max(0.001, self.deadline - time.monotonic())))
                rest = rest[self.sock.send(rest) :]
        except TimeoutError as error:
            raise DeadlineExceeded(f"the other side made no room for {len(rest)} bytes") from error
        except OSError as error:
            raise EOFError(error) from error

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
        if path is not None:
            free_path(path)
        door = socket.socket(family, socket.SOCK_STREAM)
        try:
            if path is None:
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(place)
            door.listen(backlog)
        except BaseException:
            door.close()
            raise
    except OSError as error:
        raise TransportError(f"cannot listen at {address}: {error}") from error
    return door


def connected(address: str) -> socket.socket | None:
    """A socket connected to who listens at an address; None if nobody does."""
    family, place = _place(address)
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        end.connect(place)
    except OSError:
        end.close()
        return None
    return end


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
