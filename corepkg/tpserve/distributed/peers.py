"""Memory on the GPUs of several ranks that each of them writes to, by the CUDA driver's interface.

torch's allocator gives memory back and hands it out again; what other ranks may still be writing to must stay.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache

import torch

__all__ = ["PLACE", "PeerError", "PeerMemory"]

PROCESS = os.urandom(16)
"""Tells this process from others: ranks that are threads of one share memory by its address."""

HANDLE_BYTES = 64
PLACE = struct.Struct(f"<16s{HANDLE_BYTES}sQi")
"""What a rank says of its memory: process, handle, address, device."""

ENABLE_ACCESS = 1
ALREADY_ENABLED = 704


class PeerError(Exception):
    """The driver refuses."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemAlloc_v2.argtypes = (c_void_p, c_size_t)
    driver.cuMemsetD8_v2.argtypes = (c_void_p, ctypes.c_ubyte, c_size_t)
    driver.cuIpcGetMemHandle.argtypes = (c_void_p, c_void_p)
    driver.cuIpcOpenMemHandle_v2.argtypes = (c_void_p, _Handle, c_uint)
    driver.cuDevicePrimaryCtxRetain.argtypes = (c_void_p, c_int)
    driver.cuCtxEnablePeerAccess.argtypes = (c_void_p, c_uint)
    driver.cuGetErrorString.argtypes = (c_int, c_void_p)
    return driver


def _call(name: str, *arguments: object, allowed: int = 0) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code not in (0, allowed):
        said = c_char_p()
        _driver().cuGetErrorString(code, byref(said))
        raise PeerError(f"the CUDA driver's {name} says: {(said.value or b'').decode() or code}")


class PeerMemory:
    """Memory of this rank's GPU, all its bits set; it stays until the process ends.

    Args:
        size: bytes.
        device: this rank's CUDA device.

    Raises:
        PeerError: there is not so much.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._address = c_void_p()
        handle = _Handle()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context the current one
            _call("cuMemAlloc_v2", byref(self._address), size)
            _call("cuMemsetD8_v2", self._address, 0xFF, size)
            _call("cuCtxSynchronize")
            # Where memory cannot be shared there is no handle, and nobody can open what is sent instead.
            _driver().cuIpcGetMemHandle(byref(handle), self._address)
        self.place = PLACE.pack(PROCESS, bytes(handle), self._address.value or 0, device.index)
        """What other ranks must know of it."""

    def open(self, places: Sequence[bytes]) -> list[int]:
        """Where this rank's GPU sees the memory of each.

        Args:
            places: of all ranks, in order.

        Raises:
            PeerError: this GPU cannot write to one of them.
        """
        with torch.cuda.device(self._device):
            return [self._open(place) for place in places]

    def _open(self, place: bytes) -> int:
        process, handle, there, device = PLACE.unpack(place)
        if place == self.place:
            return int(there)
        address = c_void_p()
        if process == PROCESS:
            _call("cuDevicePrimaryCtxRetain", byref(address), device)
            _call("cuCtxEnablePeerAccess", address, 0, allowed=ALREADY_ENABLED)
            return int(there)
        _call("cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(handle), ENABLE_ACCESS)
        return address.value or 0
