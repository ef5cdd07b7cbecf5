"""The fan-out: one ROUTER at the leader, one DEALER at each follower.

A publisher drops messages when a queue is full or a subscription late. A ROUTER knows its followers by name, refuses
to send to one that has gone, and each connection is a queue of its own, in order. Followers say HELLO, the leader
answers READY to each when all are there, so both return from ``connect`` with the connection proven.

A packet is two parts: lengths, with a mark for the window of bytes; and the frames, joined.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from tpserve.api import DeadlineExceeded, FanoutReceiver, FanoutSender, FrameError, PeerLost
from tpserve.api.flow import NO_MARK, WORD, Window, batches, pack, unpack
from tpserve_transport_zmq.plugin import ZmqOptions
from tpserve_transport_zmq.sockets import Context, Dealer, Part, Router, body_part

__all__ = ["ZmqFanoutReceiver", "ZmqFanoutSender"]

HELLO = b"tpserve zmq fan-out 1: hello"
READY = b"tpserve zmq fan-out 1: ready"


class ZmqFanoutSender(FanoutSender):
    """The leader's end."""

    def __init__(self, context: Context, options: ZmqOptions, address: str, followers: int) -> None:
        self._options = options
        self._address = address
        self._names = [_name(follower) for follower in range(followers)]
        self._window = Window(options.send_buffer, self._names)
        self._router = Router(context, address)

    def connect(self, deadline: float) -> None:
        """Hear HELLO from each follower, then answer READY to all."""
        missing = set(self._names)
        with self._router:
            while missing:
                parts = self._router.receive(deadline)
                if parts is not None:
                    missing.remove(_greeted(parts, missing))
                elif time.monotonic() >= deadline:
                    there = len(self._names) - len(missing)
                    raise DeadlineExceeded(f"{there} of {len(self._names)} followers came to {self._address}")
            self._send_all(READY)

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Send frames to every follower."""
        with self._router:
            for batch in batches(frames, self._options.batch):
                if not self._window.has_room(batch):
                    self._await_room(batch, deadline)
                header, body = pack(self._window.add(batch), batch)
                self._send_all(header, body_part(body))

    def close(self) -> None:
        """Close the socket; the transport's close waits until what was sent has gone out."""
        self._router.close(self._options.linger)

    def _await_room(self, batch: Sequence[bytes], deadline: float) -> None:
        self._ask()
        while not self._window.has_room(batch):
            parts = self._router.receive(deadline)
            if parts is not None:
                name, mark = parts
                self._window.returned(name, *WORD.unpack(mark))
            elif time.monotonic() >= deadline:
                raise DeadlineExceeded(f"a follower of {self._address} is {self._options.send_buffer} bytes behind")
            else:
                self._ask()

    def _ask(self) -> None:
        """Send a packet without frames, for its mark; and to see that all followers are still there."""
        self._send_all(*pack(self._window.mark(), []))

    def _send_all(self, *parts: Part) -> None:
        for name in self._names:
            if not self._router.send(name, *parts):
                raise PeerLost(f"{name.decode()} of {self._address} has gone")


class ZmqFanoutReceiver(FanoutReceiver):
    """A follower's end."""

    def __init__(self, context: Context, address: str, follower: int) -> None:
        self._address = address
        self._frames: deque[bytes] = deque()
        self._dealer = Dealer(context, address, _name(follower))

    def connect(self, deadline: float) -> None:
        """Say HELLO and wait for READY."""
        with self._dealer:
            self._dealer.send(HELLO)
            parts = self._receive(deadline, "no leader answered")
            if parts != [READY]:
                raise FrameError(f"expected a leader's greeting at {self._address}, found {parts[0][:32]!r}")

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        """Take exactly ``count`` frames."""
        with self._dealer:
            while len(self._frames) < count:
                header, body = self._receive(deadline, f"{len(self._frames)} of {count} frames came")
                mark, frames = unpack(header, body)
                self._frames.extend(frames)
                if mark != NO_MARK:
                    self._dealer.send(WORD.pack(mark))
            return [self._frames.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close(0)

    def _receive(self, deadline: float, late: str) -> list[bytes]:
        while (parts := self._dealer.receive(deadline)) is None:
            if self._dealer.lost():
                return self._receive_last()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{late} from {self._address}")
        return parts

    def _receive_last(self) -> list[bytes]:
        """What came before the connection broke is still to be had."""
        parts = self._dealer.receive(0)
        if parts is None:
            raise PeerLost(f"the leader at {self._address} has gone")
        return parts


def _name(follower: int) -> bytes:
    return b"follower %d" % follower


def _greeted(parts: list[bytes], missing: set[bytes]) -> bytes:
    name, greeting = parts
    if greeting != HELLO or name not in missing:
        raise FrameError(f"expected a greeting of {sorted(missing)}, found {greeting[:32]!r} of {name!r}")
    return name
