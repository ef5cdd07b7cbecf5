"""The ``shm`` comm: ranks of one host put their parts into shared memory, and each adds all of them up, in rank order.

Gloo takes 0.4 to 5 ms for what is 36 KB in a decode step, twice a layer; this takes as long as the slowest rank. The
memory has no name: rank 0 makes it and hands its descriptor round when the ranks meet, so nothing is left of it
whatever way they end, and the sockets of that meeting tell when a rank has gone.

Each rank has a *word* that counts its parts, and two places for them, used in turn. Two are enough: who begins part
n + 2 has seen everybody's part n + 1, and nobody begins that before having read all parts n.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tpserve.api import Closed, Comm, CommContext, DeadlineExceeded, Options, PeerLost
from tpserve.comm.options import ShmCommOptions
from tpserve.distributed import futex
from tpserve.distributed.meeting import Meeting

__all__ = ["ShmComm"]

LINE = 64
WORDS = LINE // 8
ROOMY, LOST = 1, 2
"""The words beside that of rank 0."""
PART = 1 << 20
"""Bytes of one part; what is larger goes in several."""

SHAPES = 64
"""Of parts whose tensors are kept: to make them takes longer than to add up the sum of a token."""

LOW_HALF = 0xFFFF_FFFF
LOOK = 0.5
"""Seconds between looks whether a silent rank is still there."""


class ShmComm(Comm):
    """Collectives over shared memory. After an error it can only be closed."""

    def __init__(self, options: Options, context: CommContext) -> None:
        super().__init__(options, context)
        assert isinstance(options, ShmCommOptions)
        self._spin = options.spin / 1e6
        self._others = [rank for rank in range(context.size) if rank != context.rank]
        self._turn = 0
        self._meeting = Meeting(context)
        self._memory: _Memory | None = None
        patience = context.timeout if context.join_timeout is None else context.join_timeout
        try:
            self._memory = self._share(time.monotonic() + patience)
        except BaseException:
            self.close()
            raise

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place where the tensor is contiguous."""
        whole = tensor.contiguous()
        with self._operation("all_reduce") as memory:
            for chunk in _chunks(whole):
                first, second, *others = self._exchange(memory, chunk)
                torch.add(first, second, out=chunk)
                for other in others:
                    chunk.add_(other)
        return whole

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather ``[n, d]`` of all ranks side by side."""
        rows, columns = tensor.shape
        gathered = tensor.new_empty(rows, self.context.size, columns)
        wide = max(1, min(columns, PART // tensor.itemsize))
        high = PART // tensor.itemsize // wide
        with self._operation("all_gather") as memory:
            for row in range(0, rows, high):
                for column in range(0, columns, wide):
                    block = tensor[row : row + high, column : column + wide]
                    parts = self._exchange(memory, block)
                    for rank, part in enumerate(parts):
                        gathered[row : row + high, rank, column : column + wide] = part
        return gathered.view(rows, self.context.size * columns)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Replace the content with that of rank ``source``, in place."""
        whole = tensor.contiguous()
        with self._operation("broadcast") as memory:
            for chunk in _chunks(whole):
                chunk.copy_(self._exchange(memory, chunk)[source])
        return tensor if whole is tensor else tensor.copy_(whole)

    def min(self, value: int) -> int:
        """The least over the ranks."""
        with self._operation("min") as memory:
            parts = self._exchange(memory, torch.tensor([value], dtype=torch.int64))
            return min(int(part.item()) for part in parts)

    def close(self) -> None:
        """Leave the group, which the others notice."""
        self._meeting.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _share(self, deadline: float) -> _Memory:
        size = self.context.size
        if self.context.rank == 0:
            descriptor = os.memfd_create("tpserve-comm", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, _Memory.bytes(size))
                memory = _Memory(descriptor, size)
                self._meeting.lead([descriptor], deadline)
                memory.is_roomy = self._meeting.cores() >= size  # only the leader has met all
                return memory
            finally:
                os.close(descriptor)
        (descriptor,) = self._meeting.follow(1, deadline)
        try:
            return _Memory(descriptor, size)
        finally:
            os.close(descriptor)

    @contextmanager
    def _operation(self, name: str) -> Iterator[_Memory]:
        """The memory; errors say whose and what."""
        place = f"rank {self.context.rank} of {self.context.size}, {name}"
        if self._memory is None:
            raise Closed(f"{place}: after close")
        try:
            yield self._memory
        except (DeadlineExceeded, PeerLost) as error:
            raise type(error)(f"{place}: {error}") from error

    def _exchange(self, memory: _Memory, mine: torch.Tensor) -> list[torch.Tensor]:
        """Give a part of at most PART bytes, and get those of all ranks; good until the exchange after the next."""
        parts = memory.parts(self._turn, mine)
        parts[self.context.rank].copy_(mine)
        self._turn += 1
        memory.publish(self.context.rank, self._turn)
        for rank in self._others:
            if memory.published(rank) < self._turn:
                self._await(memory, rank)
        return parts

    def _await(self, memory: _Memory, rank: int) -> None:
        begun = time.monotonic()
        looked = False
        while (found := memory.published(rank)) < self._turn:
            now = time.monotonic()
            if memory.is_roomy and now < begun + self._spin:
                os.sched_yield()  # who is waited for may need this core
                continue
            if looked:
                # It was asked after the last sleep, and has published nothing since.
                lost = self._meeting.lost()
                if lost is not None and memory.published(rank) < self._turn:
                    raise PeerLost(f"rank {memory.first_lost(lost)} has gone")
            remaining = begun + self.context.timeout - now
            if remaining <= 0:
                raise DeadlineExceeded(f"rank {rank} is silent for {self.context.timeout:g} s")
            memory.wait(rank, found, min(LOOK, remaining))
            looked = True


def _chunks(whole: torch.Tensor) -> Sequence[torch.Tensor]:
    """A contiguous tensor in pieces that are no larger than a part."""
    if whole.nbytes <= PART:
        return (whole,)
    return torch.split(whole.view(-1), PART // whole.itemsize)


class _Memory:
    """A word for each rank, one for whether all have a core of their own, one for who is lost, and places for parts."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = size
        self._memory = mmap.mmap(descriptor, self.bytes(size))
        self._words = memoryview(self._memory).cast("Q")
        # From a buffer that ctypes and torch hold on to: the memory lives as long as a view of it does.
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._addresses = [base + LINE * rank for rank in range(size)]
        self._typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._shaped: dict[tuple[torch.dtype, torch.Size], list[list[torch.Tensor]]] = {}

    @staticmethod
    def bytes(size: int) -> int:
        """How much memory a group of ``size`` ranks needs."""
        return LINE * size + 2 * size * PART

    def parts(self, turn: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's place for part ``turn``, as tensors of the same shape and dtype."""
        dtype, shape = like.dtype, like.shape
        shaped = self._shaped.get((dtype, shape))
        if shaped is None:
            typed = self._typed.get(dtype)
            if typed is None:
                typed = self._typed[dtype] = [self._places(dtype, place) for place in range(2)]
            if len(self._shaped) == SHAPES:
                self._shaped.clear()
            count = like.numel()
            shaped = [[place[:count].view(shape) for place in places] for places in typed]
            self._shaped[dtype, shape] = shaped
        return shaped[turn % 2]

    @property
    def is_roomy(self) -> bool:
        """Whether a rank that looks keeps no other off its core; not before somebody has said so."""
        return bool(self._words[ROOMY])

    @is_roomy.setter
    def is_roomy(self, is_roomy: bool) -> None:
        self._words[ROOMY] = is_roomy

    def first_lost(self, rank: int) -> int:
        """The first rank that anybody has found to have gone: ``rank``, if nobody has told of another.

        Followers see the leader go alone, and it may go because another has.
        """
        self._words[LOST] = self._words[LOST] or rank + 1
        return self._words[LOST] - 1

    def publish(self, rank: int, count: int) -> None:
        """Say that a rank's part is there, and wake who waits for it."""
        self._words[WORDS * rank] = count
        futex.wake(self._addresses[rank])

    def published(self, rank: int) -> int:
        """How many parts a rank has given."""
        return self._words[WORDS * rank]

    def wait(self, rank: int, seen: int, timeout: float) -> None:
        """Sleep until a rank has published another part, for ``timeout`` seconds at most."""
        futex.wait(self._addresses[rank], seen & LOW_HALF, timeout)

    def close(self) -> None:
        """Let go of the memory."""
        self._typed.clear()
        self._shaped.clear()
        self._words.release()

    def _places(self, dtype: torch.dtype, place: int) -> list[torch.Tensor]:
        start = LINE * self._size
        return [
            torch.frombuffer(
                self._memory, dtype=dtype, count=PART // dtype.itemsize, offset=start + PART * (2 * rank + place)
            )
            for rank in range(self._size)
        ]
