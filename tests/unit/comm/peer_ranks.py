"""The kernel of the ``peer`` comm on ranks that are processes: run as a script, in Triton's interpreter.

Its arguments are the sizes of groups, one after the other.

Exits with 0 if every rank has got, of every sum, the bits that adding up in float32 and in rank order gives.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Sequence

import torch
import triton.language as tl

from tpserve.comm.peer_kernel import PLACES, UNIT, add_up

LIMIT = 240
"""Seconds after which a rank ends that waits for one that has gone."""

BLOCK = 64
ROOM = 4 * BLOCK
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
SIZES = [UNIT, ROOM, UNIT, 3 * BLOCK - UNIT, BLOCK, ROOM, ROOM]
"""Bytes of sums that follow each other, so that programs take different numbers of turns."""


def draw(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's part, with what might be taken for what has not come."""
    size = SIZES[number] // dtype.itemsize
    generator = torch.Generator().manual_seed(100 * number + rank)
    if dtype == torch.bfloat16:  # sums are exact: the interpreter cuts off what a GPU rounds
        part = (torch.randint(-64, 64, (size,), generator=generator) / 8).to(dtype)
    else:
        part = torch.randn(size, generator=generator).to(dtype)
    part[rank % size] = -0.0
    if number % 2:
        bits_of(part)[-1 - rank] = -1
    return part


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as integers."""
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


class Rank:
    """One rank of a group whose memory every process sees."""

    def __init__(self, rank: int, size: int, start: int, stop: ctypes.c_int) -> None:
        each = PLACES * size * ROOM
        self._rank, self._size = rank, size
        addresses = [start + each * peer for peer in range(size)]
        self._table = torch.tensor([*addresses, ctypes.addressof(stop)], dtype=torch.int64)
        self._turns = torch.zeros(ROOM // BLOCK, dtype=torch.int32)

    def add_up(self, x: torch.Tensor) -> None:
        """Sum over the ranks."""
        where = (self._table, self._turns, self._rank, x.nbytes // UNIT)
        add_up[(-(-x.nbytes // BLOCK),)](bits_of(x), *where, TYPES[x.dtype], self._size, ROOM, BLOCK)

    def check(self, numbers: Sequence[int], dtype: torch.dtype) -> None:
        """Sum several tensors, and look at the results."""
        for number in numbers:
            x = draw(self._rank, number, dtype)
            self.add_up(x)
            parts = [draw(rank, number, dtype).float() for rank in range(self._size)]
            expected = sum(parts, torch.zeros(len(x))).to(dtype)
            nan = expected.isnan()
            assert torch.equal(x.isnan(), nan), (number, dtype)
            assert torch.equal(bits_of(x)[~nan], bits_of(expected)[~nan]), (number, dtype)


def on_ranks(size: int) -> None:
    """Check a group."""
    parts = PLACES * size * size * ROOM
    memory = mmap.mmap(-1, parts + ctypes.sizeof(ctypes.c_int))
    memory.write(b"\xff" * parts)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    stop = ctypes.c_int.from_buffer(memory, parts)
    for number in range(size):
        if not os.fork():
            signal.alarm(LIMIT)
            rank = Rank(number, size, start, stop)
            for dtype in TYPES:
                rank.check(range(len(SIZES)), dtype)
            os._exit(0)
    failures = 0
    for _ in range(size):
        failures += os.wait()[1] != 0
        stop.value = int(failures > 0)  # the others wait for one that has failed
    assert not failures
    # Nobody answers any more.
    stop.value = 1
    Rank(0, size, start, stop).add_up(torch.ones(4))


if __name__ == "__main__":
    for word in sys.argv[1:]:
        on_ranks(int(word))
