"""Help for authors of parts that meet at a socket: neither a full backlog nor a silent guest holds anybody up.

Nothing here is required.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path

from tpserve.api.errors import DeadlineExceeded, TransportError

__all__ = ["dial", "greetings"]

NOT_YET = {errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN}
"""Nobody is there, nobody listens, or there is no room for one more."""

LONGEST_WAIT = 3600.0


def dial(end: socket.socket, path: Path | str) -> bool:
    """Try to connect a unix socket to who listens at a path; whether that went well. Never waits.

    A socket that may wait does so without end, whatever its deadline, where more wait than the listener lets.

    Raises:
        TransportError: nobody can listen there, as when the path is too long.
    """
    timeout = end.gettimeout()
    end.setblocking(False)
    try:
        code = end.connect_ex(str(path))
        if code and code not in NOT_YET:
            raise OSError(code, errno.errorcode.get(code, str(code)))
    except OSError as error:
        raise TransportError(f"cannot connect to {path}: {error}") from error
    finally:
        end.settimeout(timeout)
    return not code


def greetings(
    door: socket.socket, size: int, deadline: float, late: Callable[[], str]
) -> Generator[tuple[socket.socket, bytes], None, None]:
    """Those who come to a listening socket and say something, with what they say; use it in ``contextlib.closing``.

    A guest who says nothing holds up nobody else, and is closed in the end; one who leaves without a word is forgotten.

    Args:
        door: the socket; it does not block afterwards.
        size: of a greeting; one is shorter if its guest says no more.
        deadline: when to give up.
        late: says what has not come by then.

    Raises:
        DeadlineExceeded: the deadline has passed.
        OSError: the door was shut.
    """
    door.setblocking(False)
    events = select.poll()
    events.register(door, select.POLLIN)
    silent: dict[int, tuple[socket.socket, bytes]] = {}
    try:
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded(late())
            for descriptor, event in events.poll(1000 * min(remaining, LONGEST_WAIT)):
                if descriptor not in silent:
                    if event & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                        raise OSError(errno.EINVAL, "the door was shut")
                    with suppress(BlockingIOError, ConnectionError):  # it has left again
                        guest = door.accept()[0]
                        silent[guest.fileno()] = guest, b""
                        events.register(guest, select.POLLIN)
                    continue
                guest, said = silent[descriptor]
                more = _heard(guest, size - len(said))
                silent[descriptor] = guest, said + more
                if more and len(said + more) < size:
                    continue
                events.unregister(descriptor)
                del silent[descriptor]
                if said + more:
                    yield guest, said + more
                else:
                    guest.close()
    finally:
        for guest, _ in silent.values():
            guest.close()


def _heard(guest: socket.socket, size: int) -> bytes:
    try:
        return guest.recv(size)
    except ConnectionError:
        return b""
