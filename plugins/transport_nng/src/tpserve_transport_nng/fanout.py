"""The fan-out: a pair of sockets for each follower.

nng's pub/sub drops messages without a word once a queue is full, and no queue is longer than 8,192. With it, a window
of credits would have to be right for correctness; a pair makes the sender wait whatever happens, keeps the order and
tells when its peer goes, for one more write per follower. Everybody meets at the leader's door.

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
from tpserve.api.flow import NO_MARK, WORD, Window, batches, pack, take, unpack
from tpserve_transport_nng.calls import Calls
from tpserve_transport_nng.door import Door
from tpserve_transport_nng.marked import MarkedPair
from tpserve_transport_nng.plugin import NngOptions
from tpserve_transport_nng.sockets import FILLER, PairSocket
from tpserve_transport_nng.visit import Visit
from tpserve_transport_nng.words import of_follower

__all__ = ["NngFanoutReceiver", "NngFanoutSender"]

LARGE = 64 << 10
LARGEST = 1 << 10
"""Bytes of what a follower says, which are marks."""


class NngFanoutSender(FanoutSender):
    """The leader's end."""

    def __init__(self, options: NngOptions, address: str, followers: int) -> None:
        self._options = options
        self._window = Window(options.send_buffer, range(followers))
        self._sends = Calls()
        self._door = Door(address, followers)
        self._pairs: list[MarkedPair] = []
        try:
            for follower in range(followers):
                peer = f"follower {follower} of {address}"
                self._pairs.append(MarkedPair(pynng.Pair0(), address, peer, self._window, follower, _question, LARGEST))
        except BaseException:
            self.close()
            raise

    def connect(self, deadline: float) -> None:
        """Let each follower in, answer all, and wait until nng has the connections at both ends."""
        followers = len(self._pairs)
        with self._door.meeting(deadline) as ends:
            for follower, (pair, end) in enumerate(zip(self._pairs, ends, strict=True)):
                try:
                    end.sendall(of_follower(follower, followers).answer)
                except ConnectionError as error:
                    raise PeerLost(f"{pair.peer} has gone") from error
                pair.adopt(end)
        waiting = self._pairs
        while waiting:
            waiting = [pair for pair in waiting if not pair.has_met(deadline)]
            self._check_followers()
            if waiting and time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{waiting[0].peer} does not answer")

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Send frames to every follower."""
        with self._sends:
            for batch in batches(frames, self._options.batch):
                self._sends.check_open()
                if not self._window.has_room(batch):
                    self._await_room(batch, deadline)
                mark = self._window.add(batch)
                messages = _messages(mark, batch)
                for pair in self._pairs:
                    pair.send_packet(mark, messages, deadline, self._look)

    def close(self) -> None:
        """End all sends, wait until what they sent has gone out and what they are owed has come, and close."""
        self._sends.end()
        self._door.close()
        deadline = time.monotonic() + self._options.linger
        for pair in self._pairs:
            pair.flush(deadline)
        for pair in self._pairs:
            pair.settle(deadline)
            pair.close()

    def _await_room(self, batch: Sequence[bytes], deadline: float) -> None:
        self._ask()
        while not self._window.has_room(batch):
            follower = self._window.slowest
            assert isinstance(follower, int)
            if self._pairs[follower].take_mark(deadline):
                continue
            self._sends.check_open()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self._pairs[follower].peer} is {self._options.send_buffer} bytes behind")
            self._ask()

    def _ask(self) -> None:
        """Ask all followers for their marks; and see that they are still there."""
        for pair in self._pairs:
            pair.ask()

    def _look(self) -> None:
        """See that nothing has happened for which nobody should wait any more."""
        self._sends.check_open()
        self._check_followers()

    def _check_followers(self) -> None:
        for pair in self._pairs:
            pair.check_peer()


class NngFanoutReceiver(FanoutReceiver):
    """A follower's end."""

    def __init__(self, address: str, follower: int, followers: int) -> None:
        address = check_address(address)
        self._frames: deque[bytes] = deque()
        self._header = b""
        self._pair = PairSocket(pynng.Pair0(), address, f"the leader at {address}")
        self._visit = Visit(address, of_follower(follower, followers), self._pair.check_open)

    def connect(self, deadline: float) -> None:
        """Say which follower this is, and wait until all have come."""
        with self._visit.meeting(deadline) as end:
            self._pair.adopt(end)
        self._pair.meet(deadline)

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        """Take exactly ``count`` frames."""
        self._pair.check_open()  # frames that came with earlier ones need no call of the socket's
        while len(self._frames) < count:
            self._take(_receive(self._pair, deadline, f"{len(self._frames)} of {count} frames came"))
        return take(self._frames, count)

    def close(self) -> None:
        """Close the socket."""
        self._pair.close()
        self._visit.close()

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


def _question(mark: int) -> bytes:
    (message,) = _messages(mark, [])
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
