"""Strangers: who comes to where others meet, and is none of them."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from tpserve.api import DeadlineExceeded, TransportError
from tpserve.api.doors import greetings
from tpserve.testing.lab import Task

__all__ = ["SEEING", "Strangers", "overheard", "silent_strangers"]

SEEING = 0.3
"""Seconds in which who wants to meet others has made a socket, if it makes one."""

HEARING = 0.2
"""The same, where no more is lost than a part of a test if it takes longer."""

KNOCKING = 0.1
"""Seconds after which a stranger who is not let in gives up."""

LOOKING = 0.01

BYTE_ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")
NONSENSE = (
    b"",
    b"\x00",
    random.Random(0).randbytes(11),
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    random.Random(1).randbytes(1 << 20),
)
SMALL = {number.to_bytes(size, order) for number in (0, 1) for size in (4, 8) for order in BYTE_ORDERS}
"""Numbers that may pass for a rank's or a follower's where these say nothing else."""
PIECE = 4096


class Place(NamedTuple):
    """Where somebody listens: what a socket's family, type and address are."""

    family: int
    type: int
    address: Any


class Strangers:
    """Who comes to where this process listens from now on.

    Each says nothing, nonsense or a small number; and stays, or leaves at once.

    Args:
        greetings: what is said by those who are expected. Strangers say half of it.
    """

    def __init__(self, greetings: list[bytes]) -> None:
        self._before = listening()
        self._words = [*NONSENSE, *sorted(SMALL), *(greeting[: len(greeting) // 2] for greeting in greetings)]
        self._guests = ExitStack()

    def come_first(self) -> None:
        """Come as soon as somebody listens, if somebody does soon."""
        _await_places(self._before, SEEING)
        self.come()

    def come(self) -> None:
        """Come to every place where somebody listens now, until nobody is let in any more."""
        for place in listening() - self._before:
            for words, stays in product(self._words, (True, False)):
                guest = _come(place, words)
                if guest is None:
                    break
                if stays:
                    self._guests.enter_context(guest)
                else:
                    guest.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._guests.close()


def listening() -> set[Place]:
    """Where this process listens."""
    places = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 iterdir opens one more
        with suppress(OSError):  # it has been closed meanwhile, or cannot listen
            if not Path(f"/proc/self/fd/{name}").is_socket():
                continue
            with socket.socket(fileno=os.dup(int(name))) as door:
                if door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    places.add(Place(door.family, door.type, _lasting(door.getsockname())))
    return places


def overheard(listen: Callable[[float], object], speak: Callable[[float], object]) -> list[bytes]:
    """What one end says first to whoever listens where another would; nothing, if none listens.

    Args:
        listen: has the end that listens wait until a deadline, and closes it.
        speak: the same with the one that comes there.
    """
    before = listening()
    waiting = Task(listen, time.monotonic() + HEARING)
    places = _await_places(before, HEARING)
    with suppress(TransportError):
        waiting.result()
    for place in places:
        with suppress(TransportError), _taken(place) as door:
            deadline = time.monotonic() + HEARING
            speaking = Task(speak, deadline)
            heard = _heard(door, deadline + HEARING)
            with suppress(TransportError):
                speaking.result()
            return heard
    return []


@contextmanager
def silent_strangers(directory: Path, count: int) -> Iterator[None]:
    """Have so many connect to each socket in a directory, or as can. They say nothing and stay."""
    guests: list[socket.socket] = []
    end = time.monotonic() + SEEING
    try:
        while not guests and time.monotonic() < end:
            for path in directory.iterdir():
                if path.is_socket():
                    guests += _crowd(path, count)
            time.sleep(LOOKING)
        yield
    finally:
        for guest in guests:
            guest.close()


def _await_places(before: set[Place], patience: float) -> set[Place]:
    """Where this process listens, and did not before; as soon as there is such a place."""
    end = time.monotonic() + patience
    while not (places := listening() - before) and time.monotonic() < end:
        time.sleep(LOOKING)
    return places


def _lasting(address: Any) -> Any:
    """An address that is good for longer, for a path may lead by way of a descriptor."""
    return os.path.realpath(address) if isinstance(address, str) and address else address


def _come(place: Place, words: bytes) -> socket.socket | None:
    """Somebody who has said as much as is heard; None if nobody is let in."""
    guest = socket.socket(place.family, place.type)
    guest.settimeout(KNOCKING)
    end = time.monotonic() + KNOCKING
    while True:
        try:
            guest.connect(place.address)
            break
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() >= end:
                guest.close()
                return None
            time.sleep(LOOKING)  # there is no room for more at the moment
    guest.setblocking(False)
    with suppress(OSError):
        while words:
            words = words[guest.send(words[:PIECE]) :]
    return guest


@contextmanager
def _taken(place: Place) -> Iterator[socket.socket]:
    """A socket that listens where another did, which may have closed a moment ago."""
    with socket.socket(place.family, place.type) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end = time.monotonic() + HEARING
        while True:
            try:
                door.bind(place.address)
                break
            except OSError as error:
                if time.monotonic() >= end:
                    raise TransportError(f"{place.address} stays taken") from error
                time.sleep(LOOKING)
        door.listen()
        yield door
    if place.family == socket.AF_UNIX:
        Path(place.address).unlink(missing_ok=True)


def _heard(door: socket.socket, deadline: float) -> list[bytes]:
    """What the first says who comes and speaks, until it leaves."""
    with suppress(DeadlineExceeded), closing(greetings(door, PIECE, deadline, lambda: "nobody spoke")) as guests:
        guest, greeting = next(guests)
        guest.close()
        return [greeting]
    return []


def _crowd(path: Path, count: int) -> list[socket.socket]:
    """Come to a socket of whatever type, until nobody else can."""
    came: list[socket.socket] = []
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        for _ in range(count):
            guest = socket.socket(socket.AF_UNIX, kind)
            guest.setblocking(False)
            if guest.connect_ex(str(path)):
                guest.close()
                break
            came.append(guest)
    return came
