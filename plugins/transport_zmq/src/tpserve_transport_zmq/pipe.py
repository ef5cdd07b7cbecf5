"""The pipe: one ROUTER at the receiver, one DEALER at each sender.

A message is its number on this connection and a mark for the window of bytes, then a frame if there is one.
"""

from __future__ import annotations

import struct
import time

from tpserve.api import DeadlineExceeded, FrameError, PeerLost, PipeReceiver, PipeSender
from tpserve.api.flow import NO_MARK, WORD, Window, read_mark
from tpserve_transport_zmq.doorkeeper import Context
from tpserve_transport_zmq.plugin import ZmqOptions
from tpserve_transport_zmq.sockets import Dealer, Part, Router, body_part

__all__ = ["PROTOCOL", "ZmqPipeReceiver", "ZmqPipeSender"]

PROTOCOL = b"tpserve zmq pipe 2"
RECEIVER = "receiver"
PREFIX = struct.Struct("<QQ")


class ZmqPipeSender(PipeSender):
    """One of the sending ends."""

    def __init__(self, context: Context, options: ZmqOptions, address: str) -> None:
        self._options = options
        self._address = address
        self._window = Window(options.send_buffer, [RECEIVER])
        self._number = 0
        self._asked = 0
        self._dealer = Dealer(context, address, PROTOCOL)

    def connect(self, deadline: float) -> None:
        """Wait for zmq's handshake: from then on the receiver's socket takes what is sent, read or not."""
        with self._dealer:
            while not self._dealer.connected(deadline):
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"no receiver came to {self._address}")

    def send(self, frame: bytes, deadline: float) -> None:
        """Send one frame."""
        with self._dealer:
            self._check_peer()
            if not self._window.has_room([frame]):
                self._await_room(frame, deadline)
            self._send(self._window.add([frame]), body_part(frame))

    def close(self) -> None:
        """Close the socket; the transport's close waits until what was sent has gone out."""
        self._dealer.close(self._options.linger)

    def _send(self, mark: int, *frame: Part) -> None:
        self._dealer.send(PREFIX.pack(self._number, mark), *frame)
        self._number += 1

    def _await_room(self, frame: bytes, deadline: float) -> None:
        # Once for all that was sent: whoever tries again and again would fill the queue with questions.
        if self._asked != self._window.mark():
            self._asked = self._window.mark()
            self._send(self._asked)
        while not self._window.has_room([frame]):
            mark = self._dealer.receive(deadline)
            if mark is not None:
                self._window.returned(RECEIVER, read_mark(mark))
                continue
            self._check_peer()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"the receiver {self._address} is {self._options.send_buffer} bytes behind")

    def _check_peer(self) -> None:
        if self._dealer.lost():
            raise PeerLost(f"the receiver {self._address} has gone")


class ZmqPipeReceiver(PipeReceiver):
    """The receiving end."""

    def __init__(self, context: Context, address: str) -> None:
        self._address = address
        self._router = Router(context, address, PROTOCOL)
        self._numbers: dict[bytes, int] = {}

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        """Wait for a first frame, then take what has already arrived."""
        frames: list[bytes] = []
        size = 0
        with self._router:
            while len(frames) < max_frames and size < max_bytes:
                frame = self._next(0 if frames else deadline)
                if frame is None:
                    break
                frames.append(frame)
                size += len(frame)
        return frames

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._router.close(0)

    def _next(self, deadline: float) -> bytes | None:
        while True:
            parts = self._router.receive(deadline)
            if parts is None:
                if time.monotonic() >= deadline:
                    return None
                continue
            name, prefix, *frame = parts
            mark = self._check(name, prefix, frame)
            if mark != NO_MARK:
                self._router.send(name, WORD.pack(mark))  # a sender that has gone needs no mark
            if frame:
                return frame[0]

    def _check(self, name: bytes, prefix: bytes, frame: list[bytes]) -> int:
        """The message's mark, if it is the next one: a sender that has connected anew goes on with a later number."""
        if len(prefix) != PREFIX.size or len(frame) > 1:
            raise FrameError(f"a message of {1 + len(frame)} parts, the first {prefix[:32]!r}, at {self._address}")
        number, mark = PREFIX.unpack(prefix)
        expected = self._numbers.get(name, 0)
        if number != expected:
            raise FrameError(f"message {number} where {expected} was due, at {self._address}: a connection broke")
        self._numbers[name] = number + 1
        return int(mark)
