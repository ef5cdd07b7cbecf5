"""An announcement as 64 bytes, the same in a frame and in shared memory.

    0        4         8          16                              56         64
    | "TPSA" | version | number   | the five fields, signed       | xxh3-64  |

All integers are little-endian. ``number`` counts the leader's announcements from 0, heartbeats included, and the hash
covers the 56 bytes before it. So one that is damaged, half written, lost or old cannot be taken for the next.
"""

from __future__ import annotations

import struct

import xxhash

from tpserve.api import Announcement, FrameError

__all__ = ["SIZE", "decode", "encode"]

MAGIC = b"TPSA"
VERSION = 1
CONTENT = struct.Struct("<4sIQ5q")
HASH = struct.Struct("<Q")
WHOLE = struct.Struct("<4sIQ5qQ")
SIZE = WHOLE.size


def encode(announcement: Announcement, number: int) -> bytes:
    """Write the announcement with this number."""
    content = CONTENT.pack(
        MAGIC,
        VERSION,
        number,
        announcement.round,
        announcement.first_frame,
        announcement.count,
        announcement.digest_round,
        announcement.digest,
    )
    return content + HASH.pack(xxhash.xxh3_64_intdigest(content))


def decode(frame: bytes, number: int) -> Announcement:
    """Read what must be the announcement with this number.

    Raises:
        FrameError: it is no announcement, it is damaged, or it is another one.
    """
    if len(frame) != SIZE:
        raise FrameError(f"expected announcement {number}, found a frame of {len(frame)} bytes")
    magic, version, found, *fields, hashed = WHOLE.unpack(frame)
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"expected {MAGIC!r} version {VERSION}, found {magic!r} version {version}")
    if hashed != xxhash.xxh3_64_intdigest(frame[: CONTENT.size]):
        raise FrameError(f"expected announcement {number}, found a damaged one")
    if found != number:
        raise FrameError(f"expected announcement {number}, found announcement {found}")
    return Announcement(*fields)
