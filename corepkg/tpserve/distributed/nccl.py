"""NCCL's own functions, for one communicator: the library that torch for CUDA brings, by its C interface.

torch's process groups watch operations from threads that end the process when something goes wrong, and know nothing of
operations in a CUDA graph. Here an operation is a kernel on the stream that is current, like any other.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_void_p
from functools import cache

import torch

__all__ = ["MAX", "MIN", "SUM", "Communicator", "NcclError", "library", "make_id"]

LIBRARY = "libnccl.so.2"

ID_BYTES = 128

SUM, MAX, MIN = 0, 2, 3

BYTES = 1
DTYPES = {
    torch.uint8: BYTES,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class NcclError(Exception):
    """NCCL refuses, or has failed."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", c_char * ID_BYTES),)


@cache
def library() -> ctypes.CDLL:
    """The library, which torch has loaded already.

    Raises:
        OSError: there is none.
    """
    nccl = ctypes.CDLL(LIBRARY)
    nccl.ncclGetErrorString.restype = c_char_p
    nccl.ncclGetErrorString.argtypes = (c_int,)
    nccl.ncclGetUniqueId.argtypes = (POINTER(_Id),)
    nccl.ncclCommInitRank.argtypes = (POINTER(c_void_p), c_int, _Id, c_int)
    nccl.ncclAllReduce.argtypes = (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
    nccl.ncclAllGather.argtypes = (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p)
    nccl.ncclBroadcast.argtypes = (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
    nccl.ncclCommDestroy.argtypes = (c_void_p,)
    nccl.ncclCommAbort.argtypes = (c_void_p,)
    return nccl


def make_id() -> bytes:
    """What all members of a new communicator must be given.

    Raises:
        NcclError: NCCL finds no way for them to meet.
    """
    made = _Id()
    _check(library().ncclGetUniqueId(byref(made)))
    return bytes(made)


class Communicator:
    """One member's end. Tensors are contiguous and on its device; operations run on torch's current stream there.

    Args:
        id: from :func:`make_id`, the same for all members.
        rank: this member.
        size: how many there are. Construction returns when all have come.
        device: this member's CUDA device, no other member's.

    Raises:
        NcclError: it cannot be made; so does every operation that fails at once.
    """

    def __init__(self, id: bytes, rank: int, size: int, device: torch.device) -> None:
        self._nccl = library()
        self._device = device
        self._size = size
        self._handle = c_void_p()
        with torch.cuda.device(device):
            _check(self._nccl.ncclCommInitRank(byref(self._handle), size, _Id.from_buffer_copy(id), rank))

    def all_reduce(self, tensor: torch.Tensor, operator: int = SUM) -> None:
        """Combine in place."""
        data, count, dtype = tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype]
        _check(self._nccl.ncclAllReduce(data, data, count, dtype, operator, self._handle, self._stream()))

    def all_gather(self, tensor: torch.Tensor, gathered: torch.Tensor) -> None:
        """Put the tensors of all ranks one after the other."""
        count = tensor.numel() * tensor.itemsize
        _check(
            self._nccl.ncclAllGather(tensor.data_ptr(), gathered.data_ptr(), count, BYTES, self._handle, self._stream())
        )

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the content with that of rank ``source``."""
        data, count = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        _check(self._nccl.ncclBroadcast(data, data, count, BYTES, source, self._handle, self._stream()))

    def destroy(self) -> None:
        """Leave, when all operations are done and no CUDA graph holds any."""
        self._nccl.ncclCommDestroy(self._handle)

    def abort(self) -> None:
        """End the operations under way, those in CUDA graphs too, and leave; returns when no graph holds any."""
        self._nccl.ncclCommAbort(self._handle)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


def _check(status: int) -> None:
    if status != 0:
        raise NcclError(f"NCCL says: {library().ncclGetErrorString(status).decode()}")
