"""Help for authors of transports: addresses that are malformed, paths that are taken. Nothing here is required."""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path
from urllib.parse import urlsplit

from tpserve.api.errors import TransportError

__all__ = ["check_address", "check_follower", "free_path", "ipc_path"]

IPC = "ipc://"


def check_address(address: str) -> str:
    """The address, if it is ``ipc:///path`` or ``tcp://host:port`` (an IPv6 host in brackets).

    Raises:
        TransportError: it is neither, the path is not absolute, or it is a directory.
    """
    if address.startswith(IPC):
        ipc_path(address)
    elif not _has_host_and_port(address):
        raise TransportError(f"cannot use {address!r} as an address: expected ipc:///path or tcp://host:port")
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
        TransportError: another address, a path that is not absolute, or a directory.
    """
    path = Path(address.removeprefix(IPC))
    if not address.startswith(IPC) or not path.is_absolute() or "\0" in address:
        raise TransportError(f"cannot use {address!r} as an address: expected ipc:///path")
    if path.is_dir():
        raise TransportError(f"cannot use {address!r} as an address: it is a directory")
    return path


def free_path(path: Path) -> None:
    """Remove a unix socket's file that a killed process has left, if there is one, so that the path can be bound.

    Raises:
        TransportError: somebody is bound to the path, it is not a socket's, or it is too long.
    """
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
    except OSError as error:
        raise TransportError(f"cannot bind {path}: {error}") from error


def _has_host_and_port(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme == "tcp" and bool(parts.hostname and parts.port) and not parts.path
    except ValueError:
        return False
