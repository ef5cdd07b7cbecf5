"""Help for authors of transports: addresses that are malformed, paths that are taken. Nothing here is required."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpserve.api.errors import TransportError

__all__ = ["alone_in", "check_address", "check_follower", "ipc_path", "taking"]

IPC = "ipc://"
HOST_AND_PORT = re.compile(r"tcp://(?:(?P<host>[\w.*-]+)|\[(?P<ipv6>[0-9A-Fa-f:.]+)(?:%\w+)?\]):(?P<port>[0-9]{1,5})")
NO_TEXT = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and what Python writes for bytes of a path that are none."""


PATIENCE = 1.0
"""Seconds that one waits for others who take something in the same directory, which takes them a moment."""


def check_address(address: str) -> str:
    """The address, if it is ``ipc:///path`` or ``tcp://host:port`` (an IPv6 host in brackets).

    Raises:
        TransportError: it is neither, or more than that; or the path is not one that :func:`ipc_path` takes.
    """
    if address.startswith(IPC):
        ipc_path(address)
    elif not _is_host_and_port(address):
        raise _refusal(address, "expected ipc:///path or tcp://host:port, and nothing else")
    return address


def check_follower(address: str, follower: int, followers: int) -> None:
    """See that there is such a follower at a fan-out's address.

    Raises:
        TransportError: it is not one of 0 ≤ follower < followers.
    """
    if not 0 <= follower < followers:
        raise TransportError(f"there is no follower {follower} of {followers} at {address}")


def ipc_path(address: str) -> Path:
    """The path of an ``ipc`` address, for what takes no others.

    Raises:
        TransportError: another address; a path that is not absolute, a directory, or cannot be looked at, as when a
            name is too long; or a control character.
    """
    path = Path(address.removeprefix(IPC))
    if not address.startswith(IPC) or not path.is_absolute():
        raise _refusal(address, "expected ipc:///path")
    if NO_TEXT.search(address):
        raise _refusal(address, "it has characters that are no text")
    try:
        is_directory = path.is_dir()
    except OSError as error:
        raise _refusal(address, error.strerror or str(error)) from error
    if is_directory:
        raise _refusal(address, "it is a directory")
    return path


@contextmanager
def taking(path: Path) -> Iterator[None]:
    """Bind a unix socket to a path inside this, and listen: of two who do so at once the second is refused.

    A file that a killed process has left goes first. Who leaves removes the file before it closes the socket: later it
    may be somebody else's.

    Raises:
        TransportError: somebody is bound to the path, it is not a socket's, or it is too long; or what is done inside
            raises OSError.
    """
    try:
        with alone_in(path.parent):
            _free(path)
            yield
    except OSError as error:
        raise TransportError(f"cannot bind {path}: {error}") from error


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold a directory, so that of two who find a file that was left only one removes it, and takes its place.

    Raises:
        TransportError: somebody else holds it for a second.
        OSError: it cannot be held.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _is_locked(descriptor):
            if time.monotonic() >= deadline:
                raise TransportError(f"cannot use {directory}: somebody else has locked it")
            time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile may have the descriptor too
    finally:
        os.close(descriptor)


def _free(path: Path) -> None:
    """Remove a unix socket's file that a killed process has left, if there is one, so that the path can be bound."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise TransportError(f"cannot bind {path}: there is something that is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            # A stream socket that is alive refuses one of another type in other words, and hears nothing of it.
            if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
                raise TransportError(f"cannot bind {path}: somebody is bound to it")
        path.unlink()
    except FileNotFoundError:
        return


def _is_locked(descriptor: int) -> bool:
    """Lock it, unless somebody else has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refusal(address: str, fault: str) -> TransportError:
    return TransportError(f"cannot use {address!r} as an address: {fault}")


def _is_host_and_port(address: str) -> bool:
    found = HOST_AND_PORT.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        return False
    return _is_name(found["host"]) if found["ipv6"] is None else _is_ipv6(found["ipv6"])


def _is_name(host: str) -> bool:
    """Whether one may ask for a host of that name: its parts are neither empty nor too long."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _is_ipv6(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return False
    return True
