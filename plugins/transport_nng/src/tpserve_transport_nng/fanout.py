"""The fan-out: a pair of sockets for each follower.

nng's pub/sub drops messages without a word once a queue is full, and no queue is longer than 8,192. With it, a window
of credits would have to be right for correctness; a pair makes the sender wait whatever happens, keeps the order and
tells when its peer goes, for one more write per follower. Follower i's pair is at ``ADDRESS.i``, over tcp at the i-th
port from the given one on. Followers say HELLO, the leader answers READY when all are there.

A packet is the header's length, the header (a mark and the frames' lengths) and the body (the frames, joined). A large
body is a message of its own, for joining and slicing would copy it twice more; its header's length is given as 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import pynng

from tpserve.api import DeadlineExceeded, FanoutReceiver, FanoutSender, FrameError, PeerLost
from tpserve.api.addresses import check_address
from tpserve.api.flow import NO_MARK, WORD, Window, batches, pack, read_mark, take, unpack
from tpserve_transport_nng.plugin import NngOptions
from tpserve_transport_nng.sockets import FILLER, PairSocket

__all__ = ["NngFanoutReceiver", "NngFanoutSender"]

HELLO = b"tpserve nng fan-out 1: hello"
READY = b"tpserve nng fan-out 1: ready"
LARGE = 64 << 10
LARGEST = 1 << 10
"""Bytes of what a follower says: a greeting, and marks."""


class NngFanoutSender(FanoutSender):
    """The leader's end."""

    def __init__(self, options: NngOptions, address: str, followers: int) -> None:
        self._options = options
        self._address = address
        self._stray = ""
        self._window = Window(options.send_buffer, range(followers))
        self._pairs: list[PairSocket] = []
        places = [_at(address, follower) for follower in range(followers)]
        try:
            for follower, place in enumerate(places):
                peer = f"follower {follower} of {address}"
                self._pairs.append(PairSocket(pynng.Pair0(), place, peer, listen=True, largest=LARGEST))
        except BaseException:
            self.close()
            raise

    def connect(self, deadline: float) -> None:
        """Hear HELLO from each follower, then answer READY to all."""
        came = [self._hears(pair, deadline) for pair in self._pairs]
        if not all(came):
            raise DeadlineExceeded(f"{sum(came)} of {len(came)} followers came to {self._address}{self._stray}")
        for pair in self._pairs:
            self._send(pair, READY, deadline)

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Send frames to every follower."""
        for batch in batches(frames, self._options.batch):
            if not self._window.has_room(batch):
                self._await_room(batch, deadline)
            messages = _messages(self._window.add(batch), batch)
            for pair in self._pairs:
                for message in messages:
                    self._send(pair, message, deadline)

    def close(self) -> None:
        """Wait until what was sent has gone out, and close the sockets."""
        deadline = time.monotonic() + self._options.linger
        for pair in self._pairs:
            pair.flush(deadline)
            pair.close()

    def _hears(self, pair: PairSocket, deadline: float) -> bool:
        """Whether a follower says HELLO by the deadline; who says something else, or nothing, makes way for others."""
        while True:
            message = pair.receive_message(deadline)
            if time.monotonic() >= deadline and (message is None or message.bytes != HELLO):
                return False
            if message is None:
                if pair.is_hushed:
                    self._stray = ", and somebody who said nothing"
                    pair.turn_away()
            elif message.bytes != HELLO:
                self._stray = f", and somebody who said {message.bytes[:32]!r}"
                pair.turn_away()
            elif message.pipe is not None and pair.settle(message.pipe.id):  # otherwise who said it has gone
                return True

    def _send(self, pair: PairSocket, message: bytes, deadline: float) -> None:
        """Send a message to one follower; while that does not read, see that all are still there."""
        while not pair.try_send(message, deadline):
            self._check_followers()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{pair.peer} does not read")

    def _await_room(self, batch: Sequence[bytes], deadline: float) -> None:
        self._ask()
        while not self._window.has_room(batch):
            follower = self._window.slowest
            assert isinstance(follower, int)
            mark = self._pairs[follower].receive(deadline)
            if mark == HELLO:  # said once more to be heard, as somebody else had been there
                continue
            if mark is not None:
                self._window.returned(follower, read_mark(mark))
            elif time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self._pairs[follower].peer} is {self._options.send_buffer} bytes behind")
            else:
                self._ask()

    def _ask(self) -> None:
        """Send a packet without frames, for its mark; and to see that all followers are still there."""
        (message,) = _messages(self._window.mark(), [])
        for pair in self._pairs:
            pair.try_send(message, 0)

    def _check_followers(self) -> None:
        for pair in self._pairs:
            pair.check_peer()


class NngFanoutReceiver(FanoutReceiver):
    """A follower's end."""

    def __init__(self, address: str, follower: int) -> None:
        self._frames: deque[bytes] = deque()
        self._header = b""
        place = _at(address, follower)
        self._pair = PairSocket(pynng.Pair0(), place, f"the leader at {place}", listen=False)

    def connect(self, deadline: float) -> None:
        """Say HELLO and wait for READY."""
        self._pair.dial(deadline)
        while (greeting := self._greet(deadline)) is None:
            if not self._pair.has_listener(deadline):
                self._pair.lose()
                self._pair.check_peer()
        if greeting != READY:
            raise FrameError(f"expected a leader's greeting at {self._pair.address}, found {greeting[:32]!r}")

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        """Take exactly ``count`` frames."""
        while len(self._frames) < count:
            self._take(_receive(self._pair, deadline, f"{len(self._frames)} of {count} frames came"))
        return take(self._frames, count)

    def close(self) -> None:
        """Close the socket."""
        self._pair.close()

    def _greet(self, deadline: float) -> bytes | None:
        """Say HELLO, and what is answered; None if this end was turned away: somebody else is there."""
        while not (self._pair.connected(deadline) and (connection := self._pair.connection)):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"nobody let this follower in, at {self._pair.address}")
            if not self._pair.has_listener(deadline):
                return None
        self._pair.send(HELLO, deadline)
        while True:
            is_there = self._pair.connection == connection
            answer = self._pair.receive(deadline if is_there else 0)  # what came before it broke is still to be had
            if answer is not None and answer != FILLER:
                break
            if answer is None and not is_there:
                return None
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"no leader answered, at {self._pair.address}")
        if not self._pair.settle(connection):
            self._pair.lose()
        return answer

    def _take(self, message: bytes) -> None:
        if self._header:
            header, self._header = self._header, b""
            body: bytes | None = message
        else:
            header, body = _parts(message)
        if body is None:
            self._header = header
            return
        mark, frames = unpack(header, body)
        self._frames.extend(frames)
        if mark != NO_MARK:
            with suppress(PeerLost):  # what it sent before is still to be had
                self._pair.try_send(WORD.pack(mark), 0)  # if it cannot be sent now, the leader asks again


def _at(address: str, follower: int) -> str:
    """Where a follower's pair is."""
    if check_address(address).startswith("ipc://"):
        return f"{address}.{follower}"
    host, _, port = address.rpartition(":")
    return check_address(f"{host}:{int(port) + follower}")


def _receive(pair: PairSocket, deadline: float, late: str) -> bytes:
    """One message that means something."""
    while True:
        message = pair.receive(deadline)
        if message is None and pair.lost:
            message = pair.receive(0)  # what came before the connection broke is still to be had
            if message is None:
                pair.check_peer()
        if message is None and time.monotonic() >= deadline:
            raise DeadlineExceeded(f"{late}, at {pair.address}")
        if message is not None and message != FILLER:
            return message


def _messages(mark: int, frames: Sequence[bytes]) -> list[bytes]:
    header, body = pack(mark, frames)
    start = WORD.pack(len(header) if len(body) <= LARGE else 0) + header
    return [start + body] if len(body) <= LARGE else [start, body]


def _parts(message: bytes) -> tuple[bytes, bytes | None]:
    """Header and body of a packet; no body if it is the next message."""
    if len(message) < WORD.size:
        raise FrameError(f"a packet of {len(message)} bytes")
    (length,) = WORD.unpack_from(message)
    if not length:
        return message[WORD.size :], None
    end = WORD.size + length
    return message[WORD.size : end], message[end:]
