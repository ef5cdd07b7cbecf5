"""Help for authors of transports: addresses that are malformed, and paths that are taken. Nothing here is required."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from tpserve.api.errors import TransportError

__all__ = ["check_address", "free_path"]

IPC = "ipc://"


def check_address(address: str) -> str:
    """The address, if it is ``ipc:///path`` or ``tcp://host:port`` (an IPv6 host in brackets).

    Raises:
        TransportError: it is neither.
    """
    if not (address.startswith(IPC) and address != IPC) and not _has_host_and_port(address):
        raise TransportError(f"cannot use {address!r} as an address: expected ipc:///path or tcp://host:port")
    return address


def free_path(path: Path) -> None:
    """Remove a unix socket's file that a killed process has left, if there is one, so that the path can be bound.

    Raises:
        OSError: somebody is bound to the path, or it is too long.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        # A stream socket that is alive tells one of another type so, and hears nothing of it.
        if probe.connect_ex(str(path)) == errno.EPROTOTYPE:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(path))
    path.unlink(missing_ok=True)


def _has_host_and_port(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme == "tcp" and bool(parts.hostname and parts.port) and not parts.path
    except ValueError:
        return False
