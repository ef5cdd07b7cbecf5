"""Whether comms work here; importing this module imports nothing large."""

from __future__ import annotations

import ctypes
import platform
from itertools import permutations

from tpserve.api.cuda import cuda_devices, no_cuda
from tpserve.distributed import futex

__all__ = ["probe_nccl", "probe_peer", "probe_shm"]

ATOMICS = 3
"""The driver's number for whether one device has atomic operations on another's memory; over PCIe none has."""


def probe_shm() -> str | None:
    """Why memory cannot be shared as the ``shm`` comm does, or None.

    A rank stores its part and then a word that says so. Only x86-64 shows others two stores in their order without
    being told to, which Python cannot.
    """
    if platform.machine() != "x86_64":
        return f"needs x86-64, and this is {platform.machine()}"
    return futex.probe()


def probe_nccl() -> str | None:
    """Why NCCL cannot be used, or None."""
    reason = no_cuda()
    if reason:
        return reason
    from tpserve.distributed.nccl import library

    try:
        library()
    except OSError as error:
        return f"torch has brought no NCCL: {error}"
    return None


def probe_peer() -> str | None:
    """Why GPUs cannot write into each other's memory over NVLink, or None."""
    reason = probe_nccl()
    if reason:
        return reason
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    for here, there in permutations(range(len(cuda_devices())), 2):
        code = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), ATOMICS, here, there)
        if code or not found.value:
            return f"GPUs {here} and {there} are not linked by NVLink"
    return None
