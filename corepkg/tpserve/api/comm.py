"""The ``comm`` kind: how tensors are combined between the ranks of one tensor-parallel group.

**The guarantee**: every rank ends an operation with identical bits, because sums are taken in one fixed order.
Ranks call the same operations in the same order with tensors of the same shape and dtype.

An operation on tensors of a CUDA device may return when it has been launched, on torch's current stream. Its errors
then come from a later operation, or from :meth:`Comm.wait`; before that, nothing that the device computed is to be
believed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tpserve.api.specs import Options

if TYPE_CHECKING:
    import torch

__all__ = ["Comm", "CommContext"]


class CommContext(msgspec.Struct, frozen=True):
    """What a :class:`Comm` is built from.

    Attributes:
        rank: this rank in its group.
        size: ranks in the group, ≥ 2.
        run_dir: the group's private directory, for rendezvous files.
        name: unique in ``run_dir``; a prefix for whatever the implementation puts there.
        device: the torch device of this rank, as a string.
        timeout: seconds after which a silent peer is an error.
        join_timeout: seconds that construction waits for the others; None: as ``timeout``.
    """

    rank: int
    size: int
    run_dir: Path
    name: str
    device: str
    timeout: float
    join_timeout: float | None = None


class Comm(ABC):
    """Collective operations over one group.

    Tensors may be empty: of no rows, or of rows of nothing.

    Every operation raises DeadlineExceeded when a peer is silent for ``context.timeout`` seconds, PeerLost when one has
    gone, and Closed after :meth:`close`.

    Args:
        options: an instance of the spec's ``options`` struct.
        context: the group and this rank's place in it. Construction returns when all ranks have joined.

    Raises:
        DeadlineExceeded: not all ranks came.
    """

    def __init__(self, options: Options, context: CommContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; may work in place and returns the result, of the same shape and dtype."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather equal tensors ``[n, d]`` of all ranks side by side, in rank order: ``[n, size * d]``."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Replace the tensor's content on every rank with that of rank ``source``, in place."""

    @abstractmethod
    def min(self, value: int) -> int:
        """The least of a 64-bit integer over the ranks; for what must be agreed at start-up."""

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until the device has come to ``event``; raises where an operation before it has not ended well.

        The default is for operations that are over when they return.
        """
        event.synchronize()

    @abstractmethod
    def close(self) -> None:
        """Leave the group. No CUDA graph holds an operation any more. May be called twice."""
