"""The ``gloo`` comm: for CPU tensors, and for ranks that share one GPU (gloo copies CUDA tensors through the host)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp, Work

from tpserve.api.comm import Comm, CommContext
from tpserve.api.specs import Options
from tpserve.distributed.gloo import make_group
from tpserve.errors import Closed, DeadlineExceeded, PeerLost

__all__ = ["GlooComm"]


class GlooComm(Comm):
    """Collectives of a gloo group of its own.

    Gloo sums each stretch of a tensor on one rank, around the ring in rank order, and passes the result on: so all
    ranks end with the same bits.
    """

    def __init__(self, options: Options, context: CommContext) -> None:
        super().__init__(options, context)
        # Any: torch has no types for a group's methods.
        self._group: Any = make_group(
            context.run_dir / context.name, context.rank, context.size, context.timeout, context.join_timeout
        )
        self._closed = False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        self._do("all_reduce", lambda: self._group.allreduce(tensor, ReduceOp.SUM))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather ``[n, d]`` of all ranks side by side."""
        rows, columns = tensor.shape
        gathered = tensor.new_empty(self.context.size * rows, columns)
        self._do("all_gather", lambda: self._group._allgather_base(gathered, tensor.contiguous()))
        return (
            gathered.view(self.context.size, rows, columns).transpose(0, 1).reshape(rows, self.context.size * columns)
        )

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Replace the content with that of rank ``source``, in place."""
        self._do("broadcast", lambda: self._group.broadcast(tensor, source))
        return tensor

    def min(self, value: int) -> int:
        """The least over the ranks."""
        least = torch.tensor([value], dtype=torch.int64)
        self._do("min", lambda: self._group.allreduce(least, ReduceOp.MIN))
        return int(least.item())

    def close(self) -> None:
        """Leave the group."""
        self._closed = True
        self._group.shutdown()

    def _do(self, operation: str, start: Callable[[], Work]) -> None:
        """Run one collective; gloo has one type of error for all that can go wrong."""
        place = f"rank {self.context.rank} of {self.context.size}, {operation}"
        if self._closed:
            raise Closed(f"{place}: after close")
        try:
            start().wait()
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise DeadlineExceeded(f"{place}: no answer within {self.context.timeout} s") from error
            at = self.context.run_dir / self.context.name
            raise PeerLost(f"{place}: a rank of the group at {at} has gone") from error
