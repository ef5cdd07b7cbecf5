"""Where links are met: a fan-out's door, at which a number of followers is waited for, and a pipe's, always open.

A door is a socket of the kernel's. One of nng's lets in whoever speaks nng's protocol; a pair has a single place, and
who takes it and is silent holds up a follower; and one that listens accepts nobody for 0.1 s after a handshake that
comes to nothing, and never closes who came then, if it is closed itself meanwhile. At a door, whoever is expected says
so; who says anything else is sent away, and who says nothing is in nobody's way. The answer is READY, and from then on
nng has the connection that was made here (:mod:`tpserve_transport_nng.sockets`): there is no other place to come to.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from threading import Event, Thread

from tpserve.api import Closed, FrameError, PeerLost, TransportError
from tpserve.api.doors import greetings
from tpserve_transport_nng.connections import Listener, has_left, hurry
from tpserve_transport_nng.words import Words, of_follower

__all__ = ["Door", "OpenDoor"]

BREATH = 0.05
"""Seconds until what could not be done, for want of descriptors, is tried again."""


class Door:
    """A leader's, which keeps its address until it is closed, by whichever thread.

    Args:
        address: where to listen.
        followers: how many are to come.

    Raises:
        TransportError: the address is taken, malformed or too long.
    """

    def __init__(self, address: str, followers: int) -> None:
        self._address = address
        self._followers = followers
        self._came: dict[int, socket.socket] = {}
        self._stray = ""
        self._closed = False
        self._listener = Listener(address)

    @contextmanager
    def meeting(self, deadline: float) -> Iterator[list[socket.socket]]:
        """Wait until all have come, and yield the connections with them, in their order; closed in the end.

        Raises:
            DeadlineExceeded: not all came.
            PeerLost: one that came has gone.
            FrameError: one came twice.
            Closed: :meth:`close` was called.
        """
        with ExitStack() as ends:
            try:
                self._greet(ends, deadline)
            except TransportError:
                raise
            except OSError as error:
                self._look()
                raise TransportError(f"cannot let anybody in at {self._address}: {error}") from error
            yield [self._came[follower] for follower in range(self._followers)]

    def close(self) -> None:
        """Leave the address, and end a meeting that waits."""
        self._closed = True
        self._listener.close()

    def _greet(self, ends: ExitStack, deadline: float) -> None:
        expected = {of_follower(follower, self._followers).greeting: follower for follower in range(self._followers)}
        size = len(of_follower(0, 1).greeting)
        with closing(greetings(self._listener.socket, size, deadline, self._late, self._look)) as guests:
            while len(self._came) < self._followers:
                guest, said = next(guests)
                follower = expected.get(said)
                if follower is None:
                    guest.close()
                    self._stray = f", and somebody who said {said!r}"
                    continue
                ends.enter_context(guest)
                if follower in self._came:
                    raise FrameError(f"a second follower {follower} came to {self._address}")
                hurry(guest)
                self._came[follower] = guest

    def _late(self) -> str:
        return f"{len(self._came)} of {self._followers} followers came to {self._address}{self._stray}"

    def _look(self) -> None:
        """See that nothing has happened for which nobody is to be waited for."""
        if self._closed:
            raise Closed("the fan-out was closed")
        for follower, end in self._came.items():
            if has_left(end):
                raise PeerLost(f"follower {follower} of {self._address} has gone")


class OpenDoor:
    """A receiver's, with a thread that lets senders in until it is closed.

    Args:
        address: where to listen.
        words: what senders say, and what they are answered.
        adopt: is given the connections.

    Raises:
        TransportError: the address is taken, malformed or too long.
    """

    def __init__(self, address: str, words: Words, adopt: Callable[[socket.socket], None]) -> None:
        self._words = words
        self._adopt = adopt
        self._closed = Event()
        self._listener = Listener(address)
        self._thread = Thread(target=self._let_in, name=f"nng door {address}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._listener.close()
            raise TransportError(f"cannot listen at {address}: {error}") from error

    def close(self) -> None:
        """Leave the address, and let nobody in any more."""
        self._closed.set()
        self._listener.shut()
        self._thread.join()
        self._listener.close()

    def _let_in(self) -> None:
        size, door = len(self._words.greeting), self._listener.socket
        while not self._closed.is_set():
            # Errors may be over soon, as when there are no descriptors left.
            with suppress(OSError, TransportError), closing(greetings(door, size, math.inf, str, self._look)) as guests:
                for guest, said in guests:
                    with guest:
                        if said == self._words.greeting:
                            self._welcome(guest)
            self._closed.wait(BREATH)

    def _welcome(self, guest: socket.socket) -> None:
        hurry(guest)
        with suppress(ConnectionError):  # it has left again
            guest.sendall(self._words.answer)
            self._adopt(guest)

    def _look(self) -> None:
        if self._closed.is_set():
            raise Closed("the pipe was closed")
