"""Help for authors of transports: frames packed together, and a window of bytes that holds a sender back.

Libraries bound their queues by messages, if at all, and lose what is queued when they close. A transport that
counts bytes itself keeps the guarantee whatever the library does: it sends while :meth:`Window.has_room`, and its
receivers send back the marks that they find. Nothing here is required.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence

from tpserve.api.errors import FrameError

__all__ = ["NO_MARK", "WORD", "Window", "batches", "pack", "read_mark", "take", "unpack"]

NO_MARK = 0
OVERHEAD = 64
WORD = struct.Struct("<Q")


class Window:
    """How far a sender is ahead of its receivers, in bytes, each frame counted with an overhead of 64.

    A sender puts a *mark* into some of its packets; a receiver that has taken such a packet off the link sends the
    mark back. Packets must arrive in order. Marks that come back may get lost: a waiting sender asks again.

    Args:
        size: bytes that the sender may be ahead of the slowest receiver. A larger packet passes on its own.
        receivers: names of the receivers, ≥ 1.
    """

    def __init__(self, size: int, receivers: Iterable[Hashable]) -> None:
        self._size = size
        self._sent = 0
        self._marked = 0
        self._returned = dict.fromkeys(receivers, 0)

    def has_room(self, frames: Sequence[bytes]) -> bool:
        """Whether a packet of these frames may be sent now."""
        ahead = self._sent - min(self._returned.values())
        return ahead == 0 or ahead + _cost(frames) <= self._size

    def add(self, frames: Sequence[bytes]) -> int:
        """Count a packet as sent; the mark that it must carry, or NO_MARK."""
        self._sent += _cost(frames)
        if (self._sent - self._marked) * 4 < self._size:
            return NO_MARK
        self._marked = self._sent
        return self._marked

    def mark(self) -> int:
        """The mark for all that was sent: a sender that must wait sends it in a packet without frames."""
        return self._sent

    def returned(self, receiver: Hashable, mark: int) -> None:
        """A receiver has sent a mark back.

        Raises:
            FrameError: there is no such receiver, or no such mark.
        """
        if receiver not in self._returned or not 0 < mark <= self._sent:
            raise FrameError(f"receiver {receiver!r} returned mark {mark}, of {self._sent} bytes sent")
        self._returned[receiver] = max(self._returned[receiver], mark)

    @property
    def slowest(self) -> Hashable:
        """The receiver that is furthest behind."""
        return min(self._returned, key=self._returned.__getitem__)


def batches(frames: Sequence[bytes], limit: int) -> Iterator[Sequence[bytes]]:
    """Cut a sequence into runs of at most ``limit`` bytes, or of one frame that is larger."""
    if sum(map(len, frames)) <= limit:  # as nearly always
        if frames:
            yield frames
        return
    start = size = 0
    for index, frame in enumerate(frames):
        size += len(frame)
        if size > limit and index > start:
            yield frames[start:index]
            start, size = index, len(frame)
    yield frames[start:]


def pack(mark: int, frames: Sequence[bytes]) -> tuple[bytes, bytes]:
    """A header with the mark and the frames' lengths, and a body; the body of a single frame is that very object."""
    header = struct.pack(f"<{1 + len(frames)}Q", mark, *map(len, frames))
    return header, frames[0] if len(frames) == 1 else b"".join(frames)


def unpack(header: bytes, body: bytes) -> tuple[int, list[bytes]]:
    """The mark and the frames of a packet.

    Raises:
        FrameError: header and body do not belong together.
    """
    words, rest = divmod(len(header), WORD.size)
    if rest or not words:
        raise FrameError(f"a packet's header has {len(header)} bytes")
    mark, *lengths = struct.unpack(f"<{words}Q", header)
    if sum(lengths) != len(body):
        raise FrameError(f"a packet's header speaks of {sum(lengths)} bytes, its body has {len(body)}")
    if len(lengths) == 1:
        return mark, [body]
    frames = []
    start = 0
    for length in lengths:
        frames.append(body[start : start + length])
        start += length
    return mark, frames


def take(frames: deque[bytes], count: int) -> list[bytes]:
    """Take the first ``count`` of at least as many frames; in one go where there are no others, as nearly always."""
    if len(frames) == count:
        taken = list(frames)
        frames.clear()
        return taken
    return [frames.popleft() for _ in range(count)]


def read_mark(message: bytes) -> int:
    """The mark of a message that a receiver sends back, packed as WORD.

    Raises:
        FrameError: it is no mark.
    """
    if len(message) != WORD.size:
        raise FrameError(f"expected a mark of {WORD.size} bytes, found {message[:32]!r}")
    (mark,) = WORD.unpack(message)
    return int(mark)


def _cost(frames: Sequence[bytes]) -> int:
    return sum(map(len, frames)) + OVERHEAD * len(frames)
