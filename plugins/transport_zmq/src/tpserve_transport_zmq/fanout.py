"""The fan-out: one ROUTER at the leader, one DEALER at each follower.

A publisher drops messages when a queue is full or a subscription late. A ROUTER knows its connections by name, refuses
to send over one that has gone, and each is a queue of its own, in order. Followers say HELLO and who they are, and with
that their connection is chosen for good; the leader answers READY to each when all are there, so both return from
``connect`` with the connection proven.

A packet is the length of a header; the header, with the frames' lengths and a mark for the window of bytes; and the
frames, joined. All is one part, as each part takes a tenth of what a packet takes; large frames are a second.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence

from tpserve.api import DeadlineExceeded, FanoutReceiver, FanoutSender, FrameError, PeerLost
from tpserve.api.flow import NO_MARK, WORD, Window, batches, pack, read_mark, take, unpack
from tpserve_transport_zmq.doorkeeper import Context
from tpserve_transport_zmq.plugin import ZmqOptions
from tpserve_transport_zmq.sockets import SHARED, Dealer, Part, Router, body_part

__all__ = ["HELLO", "PROTOCOL", "READY", "ZmqFanoutReceiver", "ZmqFanoutSender"]

PROTOCOL = b"tpserve zmq fan-out 4"
HELLO = PROTOCOL + b": hello"
READY = PROTOCOL + b": ready"
LARGEST = 1 << 10
"""Bytes of what a follower says: a greeting, and marks."""
APART = 1 << 63
"""In a header's length: the frames are a part of their own."""


class ZmqFanoutSender(FanoutSender):
    """The leader's end."""

    def __init__(self, context: Context, options: ZmqOptions, address: str, followers: int) -> None:
        self._options = options
        self._address = address
        self._count = followers
        self._guests: list[list[bytes]] = [[] for _ in range(followers)]  # each follower's connections, as they came
        self._followers: dict[bytes, int] = {}
        self._window = Window(options.send_buffer, range(followers))
        self._stray = ""
        self._asked = 0
        self._router = Router(context, address, PROTOCOL, LARGEST)

    def connect(self, deadline: float) -> None:
        """Hear HELLO from each follower, then answer READY to all."""
        with self._router:
            while not all(self._guests):
                parts = self._router.receive(deadline)
                if parts is not None:
                    self._welcome(*parts)
                elif time.monotonic() >= deadline:
                    came = f"{sum(map(bool, self._guests))} of {self._count} followers came to {self._address}"
                    raise DeadlineExceeded(came + self._stray)
            self._followers = {self._answer(number): number for number in range(self._count)}

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Send frames to every follower."""
        with self._router:
            for batch in batches(frames, self._options.batch):
                if not self._window.has_room(batch):
                    self._await_room(batch, deadline)
                self._send_all(*_parts(*pack(self._window.add(batch), batch)))
        if frames:
            os.sched_yield()  # zmq's own thread may need this core to write them

    def close(self) -> None:
        """Close the socket; the transport's close waits until what was sent has gone out."""
        self._router.close(self._options.linger)

    def _welcome(self, name: bytes, *greeting: bytes) -> None:
        """Take somebody for a follower; who greets otherwise gets no answer."""
        number = next((number for number in range(self._count) if greeting == (HELLO, WORD.pack(number))), None)
        if number is None:
            self._stray = f", and somebody who said {[part[:32] for part in greeting]}"
        else:
            self._guests[number].append(name)

    def _answer(self, follower: int) -> bytes:
        """Say READY to the first who came as this follower and is still there; the name of that connection."""
        name = next((name for name in self._guests[follower] if self._router.send(name, READY)), None)
        if name is None:
            raise PeerLost(f"follower {follower} of {self._address} has gone")
        return name

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
                slowest = f"follower {self._window.slowest} of {self._address}"
                raise DeadlineExceeded(f"{slowest} is {self._options.send_buffer} bytes behind")
        self._router.watch_no_more()

    def _take_mark(self, name: bytes, *parts: bytes) -> None:
        if name in self._followers:  # a stranger may have come late
            self._window.returned(self._followers[name], read_mark(b"".join(parts)))

    def _ask(self) -> None:
        """Send a packet without frames, for its mark; and to see that all followers are still there."""
        self._send_all(*_parts(*pack(self._window.mark(), [])))

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
        self._dealer = Dealer(context, address, PROTOCOL)

    def connect(self, deadline: float) -> None:
        """Say HELLO and wait for READY."""
        with self._dealer:
            self._dealer.send(*self._greeting)
            greeting = self._receive(deadline, "no leader answered")
            if greeting != READY:
                raise FrameError(f"expected a leader's greeting at {self._address}, found {greeting[:32]!r}")

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        """Take exactly ``count`` frames."""
        with self._dealer:
            while len(self._frames) < count:
                part = self._receive(deadline, f"{len(self._frames)} of {count} frames came")
                mark, frames = unpack(*self._packet(part))
                self._frames.extend(frames)
                if mark != NO_MARK:
                    self._dealer.send(WORD.pack(mark))
            return take(self._frames, count)

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close(0)

    def _packet(self, part: bytes) -> tuple[bytes, bytes]:
        """The header and the frames of a packet that begins with this part."""
        length = int.from_bytes(part[: WORD.size], "little")
        end = WORD.size + (length & ~APART)
        header, body = part[WORD.size : end], part[end:]
        if len(part) < end or (length & APART and body):
            raise FrameError(f"a packet that begins with {part[:32]!r} from {self._address}")
        return header, self._receive(time.monotonic(), "a packet without frames came") if length & APART else body

    def _receive(self, deadline: float, late: str) -> bytes:
        begun = time.monotonic()
        part = self._dealer.look(self._spin) if self._came_soon else None
        while part is None and (part := self._dealer.receive(deadline)) is None:
            if self._dealer.lost():
                return self._receive_last()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{late} from {self._address}")
        self._came_soon = time.monotonic() < begun + self._spin
        return part

    def _receive_last(self) -> bytes:
        """What came before the connection broke is still to be had."""
        part = self._dealer.receive(0)
        if part is None:
            raise PeerLost(f"the leader at {self._address} has gone")
        return part


def _parts(header: bytes, body: bytes) -> tuple[Part, ...]:
    """A packet as it is sent."""
    if len(body) > SHARED:
        return WORD.pack(len(header) | APART) + header, body_part(body)
    return (WORD.pack(len(header)) + header + body,)
