"""Whether memory can be shared as the ``shm`` comm does; imports nothing large."""

from __future__ import annotations

import platform

from tpserve.distributed import futex

__all__ = ["probe"]


def probe() -> str | None:
    """Why it cannot be, or None.

    A rank stores its part and then a word that says so. Only x86-64 shows others two stores in their order without
    being told to, which Python cannot.
    """
    if platform.machine() != "x86_64":
        return f"needs x86-64, and this is {platform.machine()}"
    return futex.probe()
