"""Token ids as bytes: little-endian int32, one after the other.

So they travel to the ranks, for a list of integers takes 20 times as long to read as the bytes that it came in; and so
a stretch of them can be a key.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

__all__ = ["ITEM", "TYPECODE", "pack_ids", "unpack_ids"]

TYPECODE = "i"
ITEM = 4
"""Bytes of one id."""

assert sys.byteorder == "little", "tpserve runs on little-endian machines"
assert array(TYPECODE).itemsize == ITEM


def pack_ids(ids: Iterable[int]) -> bytes:
    """Write ids.

    Raises:
        OverflowError: an id has more than 31 bits.
    """
    return array(TYPECODE, ids).tobytes()


def unpack_ids(packed: bytes) -> array[int]:
    """Read ids into an array of int32.

    Raises:
        ValueError: the bytes are no whole number of ids.
    """
    ids = array(TYPECODE)
    ids.frombytes(packed)
    return ids
