"""How the leader knows that the others are where it is, without a message: a counter for each rank in shared memory.

It lies beside what is measured and takes part in nothing. A rank writes only its own counter, which has a cache line
to itself; the leader looks at the others'.
"""

from __future__ import annotations

import mmap
import os
import time

from tpserve.errors import DeadlineExceeded

__all__ = ["Board"]

LINE = 64
WORDS = LINE // 8
LOOKS = 2000
"""Looks, for some 100 µs, before a rank that waits begins to sleep in between: the others may need its core."""
NAP = 50e-6


class Board:
    """One process's view of the counters, which begin at 0.

    Args:
        descriptor: of the memory; :meth:`create` makes it.
        ranks: how many there are.
        rank: whose view this is.
    """

    def __init__(self, descriptor: int, ranks: int, rank: int) -> None:
        self._memory = mmap.mmap(descriptor, LINE * ranks)
        self._words = memoryview(self._memory).cast("q")
        self._others = [WORDS * other for other in range(ranks) if other != rank]
        self._own = WORDS * rank

    @staticmethod
    def create(ranks: int) -> int:
        """Make the memory, which has no name and goes with its last user; its descriptor, for the caller to close."""
        descriptor = os.memfd_create("tpserve board")
        os.truncate(descriptor, LINE * ranks)
        return descriptor

    def advance(self) -> None:
        """Say that this rank has come one step further."""
        self._words[self._own] += 1

    def await_others(self, deadline: float) -> None:
        """Wait until all others have come as far as this rank.

        Raises:
            DeadlineExceeded: one has not.
        """
        words, step = self._words, self._words[self._own]
        for other in self._others:
            looks = 0
            while words[other] < step:
                looks += 1
                if looks < LOOKS:
                    continue
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"rank {other // WORDS} has not come to step {step}")
                time.sleep(NAP)

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        self._words.release()
        self._memory.close()
