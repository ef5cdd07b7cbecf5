"""The pipe: one socket with connections to many, and a pair socket at each sender.

push/pull has no way back, and a sender could not know how far it is ahead in bytes. Pair1 answers whom it likes; what
it sends may be dropped, so marks are asked for again, but what it receives never is.

A sender comes to the receiver's door. Its messages are a mark for the window of bytes, whether a frame follows, and the
frame.
"""

from __future__ import annotations

import struct
import time

import pynng

from tpserve.api import DeadlineExceeded, FrameError, PipeReceiver, PipeSender
from tpserve.api.addresses import check_address
from tpserve.api.flow import NO_MARK, WORD, Window
from tpserve_transport_nng.calls import Calls
from tpserve_transport_nng.door import OpenDoor
from tpserve_transport_nng.marked import MarkedPair
from tpserve_transport_nng.plugin import NngOptions
from tpserve_transport_nng.sockets import FILLER, ManySocket
from tpserve_transport_nng.visit import Visit
from tpserve_transport_nng.words import OF_SENDER

__all__ = ["NngPipeReceiver", "NngPipeSender"]

RECEIVER = "receiver"
PREFIX = struct.Struct("<Q?")


class NngPipeSender(PipeSender):
    """One of the sending ends."""

    def __init__(self, options: NngOptions, address: str) -> None:
        address = check_address(address)
        self._options = options
        self._window = Window(options.send_buffer, [RECEIVER])
        self._sends = Calls()
        self._pair = MarkedPair(pynng.Pair1(), address, f"the receiver at {address}", self._window, RECEIVER, _question)
        self._visit = Visit(address, OF_SENDER, self._pair.check_open)

    def connect(self, deadline: float) -> None:
        """Wait until nng has the connection at both ends: the receiver's socket takes what is sent, read or not."""
        with self._visit.meeting(deadline) as end:
            self._pair.adopt(end)
        self._pair.meet(deadline)

    def send(self, frame: bytes, deadline: float) -> None:
        """Send one frame."""
        with self._sends:
            if not self._window.has_room([frame]):
                self._await_room(frame, deadline)
            mark = self._window.add([frame])
            self._pair.send_packet(mark, [PREFIX.pack(mark, True) + frame], deadline, self._sends.check_open)

    def close(self) -> None:
        """End all sends, wait until what they sent has gone out and what they are owed has come, and close."""
        self._sends.end()
        deadline = time.monotonic() + self._options.linger
        self._pair.flush(deadline)
        self._pair.settle(deadline)
        self._pair.close()
        self._visit.close()

    def _await_room(self, frame: bytes, deadline: float) -> None:
        self._pair.ask()
        while not self._window.has_room([frame]):
            if self._pair.take_mark(deadline):
                continue
            self._sends.check_open()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self._pair.peer} is {self._options.send_buffer} bytes behind")
            self._pair.ask()


class NngPipeReceiver(PipeReceiver):
    """The receiving end."""

    def __init__(self, address: str) -> None:
        self._socket = ManySocket(address)
        try:
            self._door = OpenDoor(address, OF_SENDER, self._socket.adopt)
        except BaseException:
            self._socket.close()
            raise

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        """Wait for a first frame, then take what has already arrived."""
        self._socket.check_open()
        frames: list[bytes] = []
        size = 0
        while len(frames) < max_frames and size < max_bytes:
            frame = self._next(0 if frames else deadline)
            if frame is None:
                break
            frames.append(frame)
            size += len(frame)
        return frames

    def close(self) -> None:
        """Close the door, then the socket."""
        self._door.close()
        self._socket.close()

    def _next(self, deadline: float) -> bytes | None:
        while True:
            message = self._socket.receive_message(deadline)
            if message is None:
                if time.monotonic() >= deadline:
                    return None
                continue
            data = message.data
            if data == FILLER:
                continue
            if len(data) < PREFIX.size:
                raise FrameError(f"a message of {len(data)} bytes at {self._socket.address}")
            mark, has_frame = PREFIX.unpack_from(data)
            if mark != NO_MARK:
                self._socket.answer(message, WORD.pack(mark))
            if has_frame:
                return data[PREFIX.size :]


def _question(mark: int) -> bytes:
    return PREFIX.pack(mark, False)
