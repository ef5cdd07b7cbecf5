"""Sleeping until a word in shared memory changes: the futex system call of Linux.

A word here is 32 bits, at an address that is a multiple of four. Processes that map the same memory wake each other.
"""

from __future__ import annotations

import ctypes
import platform
import sys

__all__ = ["probe", "wait", "wake"]

NUMBERS = {"x86_64": 202, "aarch64": 98}
"""The call's number, on machines that store the low half of a 64-bit word first."""

WAIT, WAKE = 0, 1
EVERYBODY = 2**31 - 1
NANOSECONDS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_number = ctypes.c_long(NUMBERS.get(platform.machine(), -1))
_call = ctypes.CDLL(None).syscall
_call.restype = ctypes.c_long
_call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


def wait(address: int, seen: int, timeout: float) -> None:
    """Sleep while the word at ``address`` is ``seen``; for ``timeout`` seconds at most, or until a signal comes."""
    whole = int(timeout)
    limit = _Timespec(whole, int((timeout - whole) * NANOSECONDS))
    _call(_number, address, WAIT, seen, ctypes.byref(limit))


def wake(address: int) -> None:
    """Wake everybody who sleeps at ``address``. Also a full memory barrier."""
    _call(_number, address, WAKE, EVERYBODY, None)


def probe() -> str | None:
    """Why this module does not work on this machine, or None."""
    if sys.platform != "linux" or platform.machine() not in NUMBERS:
        return f"needs Linux on {' or '.join(NUMBERS)}, and this is {sys.platform} on {platform.machine()}"
    word = ctypes.c_uint32(0)
    ctypes.set_errno(0)
    if _call(_number, ctypes.addressof(word), WAKE, EVERYBODY, None) != 0:
        return "the futex system call is not allowed here"
    return None
