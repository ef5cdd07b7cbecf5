"""What ties a process to the one that started it."""

from __future__ import annotations

import ctypes

__all__ = ["die_with_parent"]

PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int) -> None:
    """Get this signal when the thread that started this process ends; 0: none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signum))
