"""The ``nccl`` comm: for ranks of one host with a GPU each. Operations are kernels, and CUDA graphs can hold them.

An operation returns when it has been launched. What waits for a rank that has gone, or stands still, is the device, or
NCCL itself where ranks have to connect first; no call that waits for them would return then. So a thread watches, and
aborts NCCL's kernels. What they leave behind is not to be believed: :meth:`NcclComm.wait` says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import torch

from tpserve.api import Closed, Comm, CommContext, DeadlineExceeded, Options, PeerLost
from tpserve.distributed.meeting import Meeting
from tpserve.distributed.nccl import ID_BYTES, MIN, Communicator, NcclError, make_id

__all__ = ["NcclComm"]

LOOK = 0.25
"""Seconds between looks whether the others are still there, and from a bad one to the abort."""

INTERFACE = "NCCL_SOCKET_IFNAME"


class NcclComm(Comm):
    """Collectives of an NCCL communicator. After an error it can only be closed.

    NCCL sums in an order that follows from the size of the tensor alone, and passes the result on: so all ranks end
    with the same bits.
    """

    def __init__(self, options: Options, context: CommContext) -> None:
        super().__init__(options, context)
        self._place = f"rank {context.rank} of {context.size}"
        self._device = torch.device(context.device)
        self._meeting = Meeting(context)
        self._nccl: Communicator | None = None
        self._failure: DeadlineExceeded | PeerLost | None = None
        self._aborted = False
        self._waiting_since: float | None = None
        self._leaving = Event()
        try:
            self._nccl = self._join()
        except NcclError as error:
            self._meeting.close()
            raise PeerLost(f"{self._place}, joining with {context.device}: {error}") from error
        except BaseException:
            self._meeting.close()
            raise
        self._watcher = Thread(target=self._watch, args=(self._nccl,), name="nccl-watch", daemon=True)
        self._watcher.start()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place where the tensor is contiguous."""
        whole = tensor.contiguous()
        with self._operation("all_reduce") as nccl:
            nccl.all_reduce(whole)
        return whole

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather ``[n, d]`` of all ranks side by side."""
        rows, columns = tensor.shape
        gathered = tensor.new_empty(self.context.size, rows, columns)
        with self._operation("all_gather") as nccl:
            nccl.all_gather(tensor.contiguous(), gathered)
        return gathered.transpose(0, 1).reshape(rows, self.context.size * columns)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Replace the content with that of rank ``source``, in place."""
        whole = tensor.contiguous()
        with self._operation("broadcast") as nccl:
            nccl.broadcast(whole, source)
        return tensor if whole is tensor else tensor.copy_(whole)

    def min(self, value: int) -> int:
        """The least over the ranks."""
        least = torch.tensor([value], dtype=torch.int64, device=self._device)
        with self._operation("min") as nccl:
            nccl.all_reduce(least, MIN)
        self._drain()
        return int(least.item())

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until the device has come to ``event``."""
        with self._waiting():
            event.synchronize()
        if self._aborted:
            raise self._error("wait")

    def close(self) -> None:
        """Leave the group, which the others notice."""
        if self._nccl is not None and self._failure is None:
            with suppress(DeadlineExceeded, PeerLost):
                self._drain()
        self._leaving.set()
        if self._failure is None:
            self._watcher.join()
        nccl, self._nccl = self._nccl, None
        if nccl is not None and self._failure is None:
            nccl.destroy()
        self._meeting.close()

    def _join(self) -> Communicator:
        patience = self.context.timeout if self.context.join_timeout is None else self.context.join_timeout
        deadline = time.monotonic() + patience
        # Ranks of one host: NCCL shall not listen on the network.
        os.environ.setdefault(INTERFACE, "lo")
        if self.context.rank == 0:
            meeting_id = make_id()
            with _descriptor(os.memfd_create("tpserve-nccl", os.MFD_CLOEXEC)) as descriptor:
                os.pwrite(descriptor, meeting_id, 0)
                self._meeting.lead([descriptor], deadline)
        else:
            (received,) = self._meeting.follow(1, deadline)
            with _descriptor(received) as descriptor:
                meeting_id = os.pread(descriptor, ID_BYTES, 0)
        return Communicator(meeting_id, self.context.rank, self.context.size, self._device)

    @contextmanager
    def _operation(self, name: str) -> Iterator[Communicator]:
        """The communicator; errors say whose and what."""
        if self._nccl is None:
            raise Closed(f"{self._place}, {name}: after close")
        if self._failure is not None:
            raise self._error(name)
        try:
            with self._waiting():
                yield self._nccl
        except NcclError as error:
            raise (self._error(name) if self._failure else PeerLost(f"{self._place}, {name}: {error}")) from error

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """This may last for ever; the watcher shall know since when."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def _error(self, name: str) -> DeadlineExceeded | PeerLost:
        assert self._failure is not None
        return type(self._failure)(f"{self._place}, {name}: {self._failure}")

    def _drain(self) -> None:
        """Wait for all that this rank has launched."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        self.wait(done)

    def _watch(self, nccl: Communicator) -> None:
        """Look after the others, until this rank leaves or they fail."""
        while not self._leaving.wait(LOOK):
            self._failure = self._look()
            if self._failure is not None:
                # Nothing more is launched. What was may end well: who leaves in good order has done his part.
                self._leaving.wait(LOOK)
                self._aborted = True
                self._abort(nccl)
                return

    def _abort(self, nccl: Communicator) -> None:
        """End the operations under way."""
        nccl.abort()

    def _look(self) -> DeadlineExceeded | PeerLost | None:
        lost, since = self._meeting.lost(), self._waiting_since
        if lost is not None:
            return PeerLost(f"rank {lost} has gone")
        if since is not None and time.monotonic() > since + self.context.timeout:
            return DeadlineExceeded(f"a rank is silent for {self.context.timeout:g} s, or the device")
        return None


@contextmanager
def _descriptor(number: int) -> Iterator[int]:
    try:
        yield number
    finally:
        os.close(number)
