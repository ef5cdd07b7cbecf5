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
from typing import NamedTuple

from tpserve.api.errors import DeadlineExceeded, TransportError

__all__ = ["dial", "greetings"]

NOT_YET = {errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN}
"""Nobody is there, nobody listens, or there is no room for one more."""

LOOK = 0.5
"""Seconds between looks at what else may have happened, while nobody speaks."""

CROWD = 64
"""Guests who are let in together and say nothing: more would take the descriptors that a process may have."""

PATIENCE = 0.1
"""Seconds that a guest has at least, however many come: who is expected speaks at once."""

BREATH = 0.01


class _Guest(NamedTuple):
    """One who has not said all yet."""

    end: socket.socket
    since: float
    said: bytes = b""


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
    door: socket.socket, size: int, deadline: float, late: Callable[[], str], look: Callable[[], None] = lambda: None
) -> Generator[tuple[socket.socket, bytes], None, None]:
    """Those who come to a listening socket and say something, with what they say; use it in ``contextlib.closing``.

    A guest who says nothing holds up nobody else, and is closed in the end, or sooner if many more come; one who leaves
    without a word is forgotten.

    Args:
        door: the socket; it does not block afterwards.
        size: of a greeting; one is shorter if its guest says no more.
        deadline: when to give up.
        late: says what has not come by then.
        look: called every half second, or more often; what it raises ends the waiting.

    Raises:
        DeadlineExceeded: the deadline has passed.
        OSError: the door was shut.
    """
    door.setblocking(False)
    number = door.fileno()  # which it has no more when another thread has closed it
    if number < 0:
        raise OSError(errno.EBADF, "the door was shut")
    events = select.poll()
    events.register(number, select.POLLIN)
    silent: dict[int, _Guest] = {}  # in the order in which they came
    try:
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded(late())
            found = dict(events.poll(1000 * min(remaining, LOOK)))
            look()
            knock = found.pop(number, 0)
            if knock & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                raise OSError(errno.EINVAL, "the door was shut")
            for descriptor in found:
                guest = silent[descriptor]
                more = _heard(guest.end, size - len(guest.said))
                said = guest.said + more
                silent[descriptor] = guest._replace(said=said)
                if more and len(said) < size:
                    continue
                events.unregister(descriptor)
                del silent[descriptor]
                if said:
                    yield guest.end, said
                else:
                    guest.end.close()
            if knock and _has_room(silent, events):
                with suppress(BlockingIOError, ConnectionError):  # it has left again
                    end = door.accept()[0]
                    silent[end.fileno()] = _Guest(end, time.monotonic())
                    events.register(end, select.POLLIN)
    finally:
        for guest in silent.values():
            guest.end.close()


def _has_room(silent: dict[int, _Guest], events: select.poll) -> bool:
    """Whether one more may come in; in a crowd only when the first of it has had its time, and is sent away."""
    if len(silent) < CROWD:
        return True
    descriptor, guest = next(iter(silent.items()))
    if time.monotonic() < guest.since + PATIENCE:
        time.sleep(BREATH)
        return False
    events.unregister(descriptor)
    del silent[descriptor]
    guest.end.close()
    return True


def _heard(guest: socket.socket, size: int) -> bytes:
    try:
        return guest.recv(size)
    except ConnectionError:
        return b""
