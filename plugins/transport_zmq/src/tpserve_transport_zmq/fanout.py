"""The fan-out: one ROUTER at the leader, one DEALER at each follower.

A publisher drops messages when a queue is full or a subscription late. A ROUTER knows its connections by name, refuses
to send over one that has gone, and each is a queue of its own, in order. Followers say HELLO and who they are, and with
that their connection is chosen for good; the leader answers READY to each when all are there, so both return from
``connect`` with the connection proven.

A packet is two parts: lengths, with a mark for the window of bytes; and the frames, joined.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence

from tpserve.api import DeadlineExceeded, FanoutReceiver, FanoutSender, FrameError, PeerLost
from tpserve.api.flow import NO_MARK, WORD, Window, batches, pack, read_mark, take, unpack
from tpserve_transport_zmq.plugin import ZmqOptions
from tpserve_transport_zmq.sockets import Context, Dealer, Part, Router, body_part

__all__ = ["ZmqFanoutReceiver", "ZmqFanoutSender"]

HELLO = b"tpserve zmq fan-out 2: hello"
READY = b"tpserve zmq fan-out 2: ready"


class ZmqFanoutSender(FanoutSender):
    """The leader's end."""

    def __init__(self, context: Context, options: ZmqOptions, address: str, followers: int) -> None:
        self._options = options
        self._address = address
        self._count = followers
        self._followers: dict[bytes, int] = {}
        self._window = Window(options.send_buffer, range(followers))
        self._asked = 0
        self._router = Router(context, address)

    def connect(self, deadline: float) -> None:
        """Hear HELLO from each follower, then answer READY to all."""
        with self._router:
            while len(self._followers) < self._count:
                parts = self._router.receive(deadline)
                if parts is not None:
                    self._welcome(*parts)
                elif time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"{len(self._followers)} of {self._count} followers came to {self._address}")
            self._send_all(READY)

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Send frames to every follower."""
        with self._router:
            for batch in batches(frames, self._options.batch):
                if not self._window.has_room(batch):
                    self._await_room(batch, deadline)
                header, body = pack(self._window.add(batch), batch)
                self._send_all(header, body_part(body))
        if frames:
            os.sched_yield()  # zmq's own thread may need this core to write them

    def close(self) -> None:
        """Close the socket; the transport's close waits until what was sent has gone out."""
        self._router.close(self._options.linger)

    def _welcome(self, name: bytes, *greeting: bytes) -> None:
        missing = set(range(self._count)).difference(self._followers.values())
        follower = next((number for number in missing if greeting == (HELLO, WORD.pack(number))), None)
        if follower is None:
            raise FrameError(f"expected a greeting of {sorted(missing)}, found {[part[:32] for part in greeting]}")
        self._followers[name] = follower

    def _await_room(self, batch: Sequence[bytes], deadline: float) -> None:
        # Not again and again: a follower that stands still would be sent questions without end.
        if self._asked != self._window.mark():
            self._asked = self._window.mark()
            self._ask()
        while not self._window.has_room(batch):
            parts = self._router.receive(deadline)
            if parts is not None:
                self._take_mark(*parts)
                continue
            if self._router.somebody_left():
                self._ask()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"a follower of {self._address} is {self._options.send_buffer} bytes behind")
        self._router.watch_no_more()

    def _take_mark(self, name: bytes, *parts: bytes) -> None:
        if name in self._followers:  # a stranger may have come late
            self._window.returned(self._followers[name], read_mark(b"".join(parts)))

    def _ask(self) -> None:
        """Send a packet without frames, for its mark; and to see that all followers are still there."""
        self._send_all(*pack(self._window.mark(), []))

    def _send_all(self, *parts: Part) -> None:
        for name, follower in self._followers.items():
            if not self._router.send(name, *parts):
                raise PeerLost(f"follower {follower} of {self._address} has gone")


class ZmqFanoutReceiver(FanoutReceiver):
    """A follower's end."""

    def __init__(self, context: Context, options: ZmqOptions, address: str, follower: int) -> None:
        self._address = address
        self._spin = options.spin / 1e6
        self._came_soon = False
        self._frames: deque[bytes] = deque()
        self._greeting = (HELLO, WORD.pack(follower))
        self._dealer = Dealer(context, address)

    def connect(self, deadline: float) -> None:
        """Say HELLO and wait for READY."""
        with self._dealer:
            self._dealer.send(*self._greeting)
            parts = self._receive(deadline, "no leader answered")
            if parts != [READY]:
                raise FrameError(f"expected a leader's greeting at {self._address}, found {parts[0][:32]!r}")

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        """Take exactly ``count`` frames."""
        with self._dealer:
            while len(self._frames) < count:
                parts = self._receive(deadline, f"{len(self._frames)} of {count} frames came")
                if len(parts) != 2:
                    raise FrameError(f"a packet of {len(parts)} parts from {self._address}")
                mark, frames = unpack(*parts)
                self._frames.extend(frames)
                if mark != NO_MARK:
                    self._dealer.send(WORD.pack(mark))
            return take(self._frames, count)

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close(0)

    def _receive(self, deadline: float, late: str) -> list[bytes]:
        begun = time.monotonic()
        parts = self._dealer.look(self._spin) if self._came_soon else None
        while parts is None and (parts := self._dealer.receive(deadline)) is None:
            if self._dealer.lost():
                return self._receive_last()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{late} from {self._address}")
        self._came_soon = time.monotonic() < begun + self._spin
        return parts

    def _receive_last(self) -> list[bytes]:
        """What came before the connection broke is still to be had."""
        parts = self._dealer.receive(0)
        if parts is None:
            raise PeerLost(f"the leader at {self._address} has gone")
        return parts
