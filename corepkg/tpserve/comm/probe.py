"""Whether comms work here; importing this module imports nothing large."""

from __future__ import annotations

import platform

from tpserve.api.cuda import no_cuda
from tpserve.distributed import futex

__all__ = ["probe_nccl", "probe_shm"]


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
