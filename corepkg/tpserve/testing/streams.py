"""Frames to send in great numbers: streams of them that stand still or end, and whether all have arrived."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

from tpserve.api import DeadlineExceeded, FanoutReceiver, FanoutSender, TransportError
from tpserve.testing.lab import Task, memory, see_soon_after, soon
from tpserve.testing.processes import Child, number_of, numbered

__all__ = [
    "BRIEFLY",
    "CHUNK",
    "EDGES",
    "LARGE",
    "LONG",
    "MANY",
    "MEGABYTE",
    "UNBOUNDED",
    "Stream",
    "burst_at_a_standstill",
    "cut",
    "difference",
    "overrun",
    "overrun_empty",
    "overrun_large",
    "read_on",
    "see_nothing_kept",
    "send_until_error",
    "take_in_cuts",
    "take_numbered",
]

MANY, CHUNK = 5000, 50
"""Frames of a longer test, and how many are taken at a time."""

LONG = 70_000
"""Frames of the longest: more than 16 bits count."""

MEGABYTE = 1 << 20
LARGE = (5, 9, 17, 33, 64, 64)
"""Megabytes of large frames."""

EDGES = tuple(size for bits in range(3, 21) for size in (2**bits - 1, 2**bits, 2**bits + 1))
"""Bytes of frames that just fit, or just do not, where something holds a power of two."""

UNBOUNDED = 1 << 30
"""A sender that gets so far ahead of a reader that does not read has no bound."""

UNCOUNTED = 1 << 24
"""And so has one that gets as many empty frames ahead: they take memory too."""

BURST_SIZE, BATCH = 4096, 5
STANDSTILL = 0.4
"""Seconds after which a sender that has not moved waits for room."""

BRIEFLY = 0.1
"""And after which it does so most likely, where nothing hangs on it."""

Item = TypeVar("Item")


def cut(frames: Sequence[Item], draw: random.Random) -> Iterator[Sequence[Item]]:
    """Cut a sequence into batches of random length, empty ones among them."""
    start = 0
    while start < len(frames):
        end = start + draw.randrange(12)
        yield frames[start:end]
        start = end


def take_in_cuts(end: FanoutReceiver, count: int, draw: random.Random) -> list[bytes]:
    """Take frames in batches of random length."""
    frames: list[bytes] = []
    while len(frames) < count:
        frames += end.recv_many(min(draw.randrange(12), count - len(frames)), soon())
    return frames


def take_numbered(take: Callable[[float], Sequence[bytes]], count: float = math.inf) -> None:
    """Take frames that are numbered from 0, so many or until an empty one comes, and see each to be the next, whole."""
    taken = 0
    while taken < count:
        for frame in take(soon()):
            if not frame:
                return
            assert number_of(frame) == taken, f"frame {number_of(frame)} comes where {taken} is due"
            is_whole = frame == numbered(taken, len(frame))
            assert is_whole, f"frame {taken} is damaged"  # not the comparison itself: pytest would show both
            taken += 1


def read_on(end: FanoutReceiver) -> TransportError:
    """Read frame by frame until there is an error, and return that."""
    try:
        while True:
            end.recv_many(1, soon())
    except TransportError as error:
        return error


class Stream:
    """Sends one thing after the other in a thread of its own, until it is told which is the last.

    Args:
        send: sends the thing with a number, or some from there on.
        most: a sender that gets so many ahead of a reader that does not read has no bound.
        batch: how many go with one call.

    Attributes:
        sent: how many are accepted so far.
        sending: the thread.
    """

    def __init__(self, send: Callable[[int], object], most: int, batch: int = 1) -> None:
        self.sent = 0
        self._send = send
        self._most = most
        self._batch = batch
        self._last: float = math.inf
        self.sending = Task(self._send_on)

    def stand_still(self, pause: float = STANDSTILL) -> int:
        """Wait until the sender waits for room, and moves for so many seconds no more; how many it has got ahead."""
        seen = -1
        while seen < self.sent < self._most:
            seen = self.sent
            time.sleep(pause)
        if self.sent >= self._most:
            self._last = 0
            pytest.fail(f"a sender got {self.sent} ahead and does not wait")
        return self.sent

    def finish(self, last: int) -> None:
        """Send so many in all, and wait for the end."""
        self._last = last
        self.sending.result()

    def _send_on(self) -> None:
        while self.sent < self._last:
            self._send(self.sent)
            self.sent += self._batch


def see_nothing_kept(standing: int, passed: int) -> None:
    """See that memory was taken for what is under way alone.

    Args:
        standing: bytes that the process had while much was under way and nothing moved.
        passed: bytes that were sent and read since then, several times as many as were under way.
    """
    grown = memory() - standing
    assert grown < passed / 2, f"{passed} bytes that were read have left {grown} bytes of memory"


def overrun(send: Callable[[bytes, float], object]) -> int:
    """Send to nobody who reads until the deadline refuses a frame; how many were accepted."""
    return _overrun(send, MEGABYTE, lambda number: numbered(number, MEGABYTE))


def overrun_large(send: Callable[[bytes, float], object]) -> None:
    """The same with frames of 64 MB: who counts frames and not bytes accepts as many as of others."""
    frame = numbered(0, max(LARGE) * MEGABYTE)
    _overrun(send, len(frame), lambda _number: frame)


def _overrun(send: Callable[[bytes, float], object], size: int, make: Callable[[int], bytes]) -> int:
    for number in range(UNBOUNDED // size):
        frame = make(number)
        deadline = time.monotonic() + 0.5
        try:
            send(frame, deadline)
        except DeadlineExceeded:
            see_soon_after(deadline)
            return number
    pytest.fail(f"a sender got {UNBOUNDED} bytes ahead, in frames of {size}")


def burst_at_a_standstill(send: Callable[[Sequence[bytes], float], object], child: Child) -> int:
    """Stop a process that reads, send until there is no room left, and go on when it reads: 20,000 frames at least.

    While nothing moves, this process may have taken memory for what it has accepted, and no more.

    Returns:
        How many frames were sent, 10,000 of them after it had to wait.
    """

    def send_batch(first: int) -> None:
        send([numbered(number, BURST_SIZE) for number in range(first, first + BATCH)], soon())

    child.send(signal.SIGSTOP)
    before = memory()
    stream = Stream(send_batch, UNBOUNDED // BURST_SIZE, BATCH)
    seen = stream.stand_still()
    taken = memory() - before
    child.send(signal.SIGCONT)
    stream.finish(max(20_000, seen + 10_000))
    assert taken <= _most_memory(seen, BURST_SIZE), f"{seen} frames of {BURST_SIZE} bytes take {taken} bytes"
    return stream.sent


def overrun_empty(leader: FanoutSender, child: Child) -> None:
    """Stop a process that reads, and send empty frames until the deadline refuses them."""
    child.send(signal.SIGSTOP)
    before = memory()
    for count in range(0, UNCOUNTED, 1000):
        try:
            leader.send_many([b""] * 1000, time.monotonic() + STANDSTILL)
        except DeadlineExceeded:
            taken = memory() - before
            assert taken <= _most_memory(count, 0), f"{count} empty frames take {taken} bytes"
            return
    pytest.fail(f"a sender got {UNCOUNTED} empty frames ahead")


def send_until_error(send: Callable[[bytes], object], pause: float = 0, most: float = math.inf) -> None:
    """Send for as long as it goes, or so many frames."""
    end = soon()
    number = 0
    while number < most and time.monotonic() < end:
        send(numbered(number))
        number += 1
        time.sleep(pause)


def difference(taken: Sequence[bytes], sent: Sequence[bytes]) -> str | None:
    """Where what was taken is not what was sent; None if it is. In words, for frames may be large."""
    for number, (found, expected) in enumerate(zip(taken, sent, strict=False)):
        if not isinstance(found, bytes):
            return f"frame {number}: a {type(found).__name__}, not bytes"
        if found != expected:
            return (
                f"frame {number}: {len(found)} bytes that begin {found[:16]!r}, not {len(expected)}, {expected[:16]!r}"
            )
    return None if len(taken) == len(sent) else f"{len(taken)} frames, not {len(sent)}"


def _most_memory(frames: int, size: int) -> float:
    """Bytes that so many frames may take: some more than their content, and what every frame costs."""
    return 1.5 * frames * size + 256 * frames + 64 * MEGABYTE
