"""A visit to a door: that of a follower to its leader's, of a sender to its receiver's."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from tpserve.api import DeadlineExceeded, FrameError, PeerLost
from tpserve.api.addresses import check_address
from tpserve_transport_nng.connections import ATTEMPTS, SLICE, connected
from tpserve_transport_nng.words import Words

__all__ = ["Visit"]


class Visit:
    """One to where somebody is, or will be.

    Args:
        address: where the door is.
        words: what to say there, and to hear.
        look: called several times a second while it waits; what it raises ends that.

    Raises:
        TransportError: the address is malformed.
    """

    def __init__(self, address: str, words: Words, look: Callable[[], None]) -> None:
        self._address = check_address(address)
        self._words = words
        self._look = look
        self._host: socket.socket | None = None
        self._lock = Lock()

    @contextmanager
    def meeting(self, deadline: float) -> Iterator[socket.socket]:
        """Wait until there is a host and it answers, and yield the connection.

        Who gives up stays until it is closed, so that a leader who waits for others knows that it had come.

        Raises:
            DeadlineExceeded: nobody came, or has not answered.
            PeerLost: the host has gone, or has sent this guest away.
            FrameError: who listens there is somebody else.
            TransportError: nobody can listen there, as when the path is too long.
        """
        host = f"the {self._words.host} at {self._address}"
        with self._lock:
            self._host = end = self._dialled(deadline)
            try:
                end.sendall(self._words.greeting)
                answer = self._heard(end, deadline)
            except ConnectionError as error:
                raise PeerLost(f"{host} has gone") from error
            if not answer:
                raise PeerLost(f"{host} has gone, or does not expect {self._words.guest}")
            if answer != self._words.answer:
                raise FrameError(f"expected a {self._words.host}'s greeting at {self._address}, found {answer!r}")
            yield end

    def close(self) -> None:
        """Leave, once ``look`` has ended a meeting that waits."""
        with self._lock:
            if self._host is not None:
                self._host.close()

    def _dialled(self, deadline: float) -> socket.socket:
        while True:
            self._look()
            host = connected(self._address, deadline)
            if host is not None:
                return host
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"no {self._words.host} came to {self._address}")
            time.sleep(ATTEMPTS)

    def _heard(self, host: socket.socket, deadline: float) -> bytes:
        """What the host says; less than it should, or nothing, if it leaves."""
        size = len(self._words.answer)
        events = select.poll()
        events.register(host, select.POLLIN)
        heard = b""
        while len(heard) < size:
            is_heard = events.poll(1000 * max(0.0, min(deadline - time.monotonic(), SLICE)))
            more = host.recv(size - len(heard)) if is_heard else b""
            heard += more
            if not more:
                self._look()
                if time.monotonic() >= deadline:  # at which a leader may have given up, too
                    raise DeadlineExceeded(f"{self._words.late}, at {self._address}")
                if is_heard:
                    break
        return heard
