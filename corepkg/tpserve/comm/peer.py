"""The ``peer`` comm: GPUs linked by NVLink add small tensors by a kernel of our own, and NCCL does all else.

A rank stores its part into the memory of every other, and adds up what has come to its own: one way over the link.
Numbers tell by themselves that they have come, so there are no flags, and no order of stores to keep.

Whatever way a rank ends, the watcher of :class:`~tpserve.comm.nccl.NcclComm` sees it; a word in the host's memory then
ends the kernels that wait for it.
"""

from __future__ import annotations

import logging

import torch
import triton.language as tl

from tpserve.api import CommContext, Options
from tpserve.comm.nccl import NcclComm
from tpserve.comm.options import PeerCommOptions
from tpserve.comm.peer_kernel import PLACES, UNIT, add_up
from tpserve.distributed.nccl import Communicator
from tpserve.distributed.peers import PLACE, PeerError, PeerMemory

__all__ = ["PeerComm"]

logger = logging.getLogger(__name__)

BLOCK, WARPS = 2048, 4
"""Bytes of a tensor for one program, and its warps: a thread for each 16 bytes."""

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
BITS = {2: torch.int16, 4: torch.int32}


class PeerComm(NcclComm):
    """Collectives of an NCCL communicator, but for small sums. After an error it can only be closed.

    Each rank adds for itself, in float32 and in rank order: so all ranks end with the same bits. Operations of a rank
    run one after the other, as on one stream.
    """

    def __init__(self, options: Options, context: CommContext) -> None:
        assert isinstance(options, PeerCommOptions)
        # The watcher, which starts before the memory is shared, may need it at once.
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        super().__init__(options, context)
        # A rank of N sends N - 1 times a sum, which NCCL saves: of more ranks only smaller sums gain.
        self._room = options.largest // (context.size - 1) ** 2 // BLOCK * BLOCK
        try:
            self._table = self._share() if self._room else None
        except BaseException:
            self.close()
            raise
        self._turns = torch.zeros(self._room // BLOCK, dtype=torch.int32, device=self._device)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place where the tensor is contiguous and its memory well aligned."""
        table, size = self._table, tensor.nbytes
        if table is None or not 0 < size <= self._room or size % UNIT or tensor.dtype not in TYPES:
            return super().all_reduce(tensor)
        whole = tensor.contiguous()
        if whole.data_ptr() % UNIT:
            whole = whole.clone()
        with self._operation("all_reduce"):
            self._launch(whole, table)
        return whole

    def _launch(self, whole: torch.Tensor, table: torch.Tensor) -> None:
        size, bits = whole.nbytes, whole.view(BITS[whole.itemsize])
        rank, ranks = self.context.rank, self.context.size
        with torch.cuda.device(self._device):
            add_up[(-(-size // BLOCK),)](
                bits,
                table,
                self._turns,
                rank,
                size // UNIT,
                TYPES[whole.dtype],
                ranks,
                self._room,
                BLOCK,
                num_warps=WARPS,
            )

    def _abort(self, nccl: Communicator) -> None:
        self._stop.fill_(1)
        super()._abort(nccl)

    def _share(self) -> torch.Tensor | None:
        """The addresses that the kernel needs, or None if a rank's GPU cannot write to another's."""
        memory = PeerMemory(PLACES * self.context.size * self._room, self._device)
        mine = torch.frombuffer(bytearray(memory.place), dtype=torch.uint8).to(self._device)
        gathered = bytes(self.all_gather(mine.unsqueeze(0)).flatten().tolist())
        places = [gathered[start : start + PLACE.size] for start in range(0, len(gathered), PLACE.size)]
        addresses: list[int] = []
        try:
            addresses = memory.open(places)
        except PeerError as error:
            logger.warning("NCCL computes all sums: %s", error)
        if not self.min(len(addresses)):
            return None
        return torch.tensor([*addresses, self._stop.data_ptr()], dtype=torch.int64, device=self._device)
