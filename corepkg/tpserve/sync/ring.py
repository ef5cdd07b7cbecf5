"""Announcements in shared memory: a ring with one writer and a cursor for each reader.

    0              64             128                  64 (1 + readers)
    | published    | taken by 0   | taken by 1   | …   | announcement 0 | announcement 1 | …

``published`` and ``taken`` count announcements, in 64 bits; each stands alone in a cache line, as does each
announcement. The writer stores an announcement and then ``published``, a reader loads them the other way round. x86
keeps such an order. Where a machine does not, the reader finds a hash or a number that is wrong, and looks again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time

from tpserve.api import Announcement, FrameError
from tpserve.distributed import futex
from tpserve.sync import wire

__all__ = ["Ring"]

SLOTS = 1024
LINE = 64
WORDS = LINE // 8
PUBLISHED = 0
LOW_HALF = 0xFFFF_FFFF
SETTLING = 0.1
"""Seconds that another core's stores may take to arrive; they take nanoseconds."""


class Ring:
    """One process's view. Close it before the descriptor is gone; nobody may use it meanwhile.

    Args:
        descriptor: of the memory; :meth:`create` makes it.
        readers: how many there are.
    """

    def __init__(self, descriptor: int, readers: int) -> None:
        self._readers = readers
        self._room = 0  # how many announcements may be published, by what readers had taken when last asked
        self._memory = mmap.mmap(descriptor, _size(readers))
        self._words = memoryview(self._memory).cast("Q")
        self._published = ctypes.c_uint32.from_buffer(self._memory, PUBLISHED)
        self._address = ctypes.addressof(self._published)

    @staticmethod
    def create(readers: int) -> int:
        """Make the memory of a ring, which lives as long as a descriptor or a view of it does; the descriptor."""
        descriptor = os.memfd_create("tpserve-sync", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _size(readers))
        return descriptor

    def is_full(self) -> bool:
        """Whether the slowest reader has all slots still before it."""
        if self._words[PUBLISHED] >= self._room:
            taken = min(self._words[WORDS * (1 + reader)] for reader in range(self._readers))
            self._room = taken + SLOTS
        return self._words[PUBLISHED] >= self._room

    def write(self, announcement: Announcement) -> None:
        """Publish the next announcement; only while the ring is not full. Readers that sleep need :meth:`wake`."""
        number = self._words[PUBLISHED]
        start = self._slot(number)
        self._memory[start : start + wire.SIZE] = wire.encode(announcement, number)
        self._words[PUBLISHED] = number + 1

    def read(self, reader: int) -> Announcement | None:
        """Take the next announcement; None if there is none.

        Raises:
            FrameError: what is there is damaged.
        """
        number = self._words[WORDS * (1 + reader)]
        if self._words[PUBLISHED] == number:
            return None
        announcement = self._load(number)
        self._words[WORDS * (1 + reader)] = number + 1
        return announcement

    def wait(self, reader: int, spin: float, timeout: float) -> bool:
        """Wait until there is something to read, or the timeout, or :meth:`wake`; whether there is something.

        Args:
            reader: who waits.
            spin: seconds to look without sleeping.
            timeout: seconds to sleep after that.
        """
        words = self._words
        seen = words[WORDS * (1 + reader)]
        stop = time.monotonic() + spin
        while words[PUBLISHED] == seen:
            if time.monotonic() >= stop:
                futex.wait(self._address, seen & LOW_HALF, timeout)
                break
            os.sched_yield()
        return words[PUBLISHED] != seen

    def wake(self) -> None:
        """Wake readers that sleep."""
        if not self._memory.closed:
            futex.wake(self._address)

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        if not self._memory.closed:
            del self._published
            self._words.release()
            self._memory.close()

    def _slot(self, number: int) -> int:
        return LINE * (1 + self._readers + number % SLOTS)

    def _load(self, number: int) -> Announcement:
        start = self._slot(number)
        patience = time.monotonic() + SETTLING
        while True:
            try:
                return wire.decode(self._memory[start : start + wire.SIZE], number)
            except FrameError:
                if time.monotonic() >= patience:
                    raise


def _size(readers: int) -> int:
    return LINE * (1 + readers + SLOTS)
