"""A ring of bytes in shared memory, with one writer and a place for each reader.

    0              64             128            192                64 (2 + readers)
    | published    | wanted       | taken by 0   | taken by 1   | … | record | record | …      the ring      … |

The words count bytes ever written or taken, in 64 bits, each alone in its cache line. A message is one record or more:

    | bytes of the message from here on, and its flag | digest | piece, padded to 16 bytes |

Records begin at multiples of 16 and hold 256 KiB at most, and none goes round the end: a piece that would is cut there.
So messages may be of any size, and a large one is read while it is still being written.

**Why no reader sees half a record.** The writer stores a record and then ``published``; readers load them the other way
round; CPython makes one load or store of an aligned word. x86-64 keeps the order of stores and that of loads. aarch64
may not: there a reader may find old bytes where a record is, and does not get past the digest, which holds for its
length, its bytes and its place. It looks again until what was stored has arrived, and if that takes very
long, the record is damaged. The way back needs no more: a reader takes the digest of its own copy, and stores ``taken``
only after a branch on the result, and the writer writes only after a branch on ``taken``. No store passes a branch
that it depends on, on either machine.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from io import BytesIO

from xxhash import xxh3_64_intdigest

from tpserve.api import FrameError

__all__ = ["RingReader", "RingWriter", "create"]

HEADER = struct.Struct("<QQ")
ALIGN = 16
LINE = 64
WORDS = LINE // 8
MIX = 0x9E37_79B9_7F4A_7C15
PUBLISHED, WANTED, TAKEN = 0, WORDS, 2 * WORDS

PIECE = 256 << 10
"""Bytes that are published together at most: small enough to stay in a cache until they are read."""

SETTLING = 0.1
"""Seconds that another core's stores may take to arrive; they take nanoseconds."""


def create(size: int, readers: int) -> int:
    """Make the memory of a ring, which lives as long as a descriptor or a view of it does; the descriptor.

    Raises:
        OSError: there is not so much memory.
    """
    descriptor = os.memfd_create("tpserve-transport-shm", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, _start(readers) + size // ALIGN * ALIGN)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Ring:
    """One end's view of the memory. Nobody may use it after :meth:`close`.

    Args:
        descriptor: of the memory, not needed any more afterwards.
        readers: how many there are.
    """

    def __init__(self, descriptor: int, readers: int) -> None:
        self._memory = mmap.mmap(descriptor, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._view = memoryview(self._memory)
        self._words = self._view.cast("Q")
        self._start = _start(readers)
        self._size = len(self._memory) - self._start
        self._piece = min(PIECE, self._size // 4 - HEADER.size)

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._view.release()
        self._memory.close()

    def _fitting(self, rest: int, position: int) -> int:
        """How many bytes of a message the record at a position holds, when there are ``rest`` from there on."""
        return min(rest, self._piece, self._size - position % self._size - HEADER.size)


class RingWriter(Ring):
    """The writer's end."""

    def __init__(self, descriptor: int, readers: int) -> None:
        super().__init__(descriptor, readers)
        self._taken = range(TAKEN, TAKEN + WORDS * readers, WORDS)
        self._written = 0
        self._limit = 0
        self._refresh()

    @property
    def unpublished(self) -> int:
        """Bytes written and not published."""
        written: int = self._written - self._words[PUBLISHED]
        return written

    def has_room(self) -> bool:
        """Whether a piece can be written now."""
        if self._written > self._limit:
            self._refresh()
        return self._written <= self._limit

    def want_room(self) -> None:
        """Have readers tell when a quarter of the ring is free. A hint: on rare occasions nobody does."""
        self._words[WANTED] = self._written - self._size + self._size // 4

    def write(self, message: bytes, start: int, flag: bool) -> int:
        """Write the next piece of a message, from ``start``; only while there is room. Returns where it ended."""
        rest = len(message) - start
        length = self._fitting(rest, self._written)
        piece = message if length == len(message) else memoryview(message)[start : start + length]
        word = rest << 1 | flag
        at = self._start + self._written % self._size
        body = at + HEADER.size
        HEADER.pack_into(self._memory, at, word, xxh3_64_intdigest(piece, _seed(word, self._written)))
        self._memory[body : body + length] = piece
        self._written += _padded(length)
        return start + length

    def publish(self) -> None:
        """Let readers see what was written; those that sleep must be woken."""
        self._words[PUBLISHED] = self._written

    def slowest(self) -> int:
        """The reader that is furthest behind."""
        return min(range(len(self._taken)), key=lambda reader: self._words[self._taken[reader]])

    def _refresh(self) -> None:
        """See how far readers are.

        Raises:
            FrameError: one is where nothing was written, or has been overwritten.
        """
        slowest = min([self._words[index] for index in self._taken])
        if not self._written - self._size <= slowest <= self._written:
            raise FrameError(f"a reader is at byte {slowest} of {self._written} in a ring of {self._size}")
        self._limit = slowest + self._size - HEADER.size - self._piece


class RingReader(Ring):
    """A reader's end.

    Args:
        descriptor: of the memory, not needed any more afterwards.
        readers: how many there are.
        reader: which of them this is.
        bell: an event to ring when the writer wants room and now has it.
    """

    def __init__(self, descriptor: int, readers: int, reader: int, bell: int) -> None:
        super().__init__(descriptor, readers)
        self._mine = TAKEN + WORDS * reader
        self._bell = bell
        self._taken = 0
        self._alone = b""
        self._message: BytesIO | None = None

    def has_more(self) -> bool:
        """Whether there is something to read, if only a piece."""
        more: bool = self._words[PUBLISHED] != self._taken
        return more

    def next(self) -> tuple[bytes, bool] | None:
        """Take the next message, with its flag; None while it has not come in full.

        Raises:
            FrameError: what is there is damaged.
        """
        while self.has_more():
            length, word = self._load()
            rest, flag = word >> 1, bool(word & 1)
            self._free(_padded(length))
            if self._message is None:
                if length == rest:
                    return self._alone, flag
                self._message = _buffer(rest)
                self._message.write(self._alone)
            else:
                self._message.seek(length, os.SEEK_CUR)
            if length == rest:
                message, self._message = self._message.getvalue(), None
                return message, flag
        return None

    def _load(self) -> tuple[int, int]:
        """Copy the next piece; its length, and the word before it."""
        at = self._start + self._taken % self._size
        patience = 0.0
        while True:
            word, digest = HEADER.unpack_from(self._memory, at)
            length = self._fitting(word >> 1, self._taken)
            if self._copy(at + HEADER.size, length, _seed(word, self._taken)) == digest:
                return length, word
            patience = patience or time.monotonic() + SETTLING
            if time.monotonic() >= patience:
                raise FrameError(f"the record at byte {self._taken} is damaged")

    def _copy(self, start: int, length: int, seed: int) -> int:
        """Copy a piece, behind those of its message that are there; the digest of the copy."""
        if self._message is None:
            self._alone = self._memory[start : start + length]
            return xxh3_64_intdigest(self._alone, seed)
        place = self._message.getbuffer()[self._message.tell() :][:length]
        place[:] = self._view[start : start + len(place)]
        return xxh3_64_intdigest(place, seed)

    def _free(self, size: int) -> None:
        before, self._taken = self._taken, self._taken + size
        self._words[self._mine] = self._taken
        if before < self._words[WANTED] <= self._taken:
            os.eventfd_write(self._bell, 1)


def _buffer(size: int) -> BytesIO:
    """For a message of that size, which it gives away uncopied; written to once, so that it need never grow."""
    buffer = BytesIO()
    buffer.seek(size - 1)
    buffer.write(b"\0")
    buffer.seek(0)
    return buffer


def _start(readers: int) -> int:
    """Where the ring begins in the memory."""
    return LINE * (2 + readers)


def _padded(length: int) -> int:
    """What a piece takes in the ring."""
    return (HEADER.size + length + ALIGN - 1) // ALIGN * ALIGN


def _seed(word: int, position: int) -> int:
    """Of a record's digest: so one that is left from an earlier time does not pass for another."""
    return (word * MIX ^ position) & 0xFFFF_FFFF_FFFF_FFFF
