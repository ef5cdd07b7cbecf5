"""The envelope around every message: written once by its producer, opaque to transports, checked by every reader.

    0        4        6        8                16               24               32
    | "TPSV" | version| producer|  sequence     |  length        |  xxh3-64       | payload …

All integers are little-endian and unsigned. The hash is that of the payload, seeded with producer and sequence, so a
frame cannot be cut, altered or attributed to another producer without notice. Sequence numbers of one producer start
at 0 and have no gaps, so a frame cannot be lost without notice either.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

from tpserve.errors import FrameError

__all__ = ["SIZE", "Opener", "Sealer"]

MAGIC = b"TPSV"
VERSION = 2
HEADER = struct.Struct("<4sHHQQQ")
SIZE = HEADER.size
WORDS = struct.Struct("<4Q")
"""The same header, with magic, version and producer in one word."""
PRODUCER = 0xFFFF << 48
"""Where in that word the producer is, and where it is in the seed of the hash."""

LARGE = 64 << 10
"""A smaller payload is copied out of its frame, which costs less than a view of it."""


class Sealer:
    """Writes the envelopes of one producer, numbering them from 0.

    Args:
        producer: 0 … 65535.
    """

    def __init__(self, producer: int) -> None:
        self.producer = producer
        self.sequence = 0

    def seal(self, payload: bytes) -> bytes:
        """Put a message into the next envelope."""
        producer, sequence = self.producer, self.sequence
        self.sequence += 1
        digest = xxhash.xxh3_64_intdigest(payload, producer << 48 ^ sequence)
        return HEADER.pack(MAGIC, VERSION, producer, sequence, len(payload), digest) + payload


class Opener:
    """Reads the envelopes of any number of producers and holds each to its sequence."""

    def __init__(self) -> None:
        self._due: dict[int, int] = {}  # by the first word, which says magic, version and producer

    def open(self, frame: bytes) -> bytes | memoryview:
        """Check a frame and return its message.

        Raises:
            FrameError: it is no envelope of this version, it is damaged, or it is not the producer's next one.
        """
        return self.open_all((frame,))[0]

    def open_all(self, frames: Iterable[bytes]) -> list[bytes | memoryview]:
        """The same for several frames, in one pass: a round's time goes into this.

        Raises:
            FrameError: as for :meth:`open`; the frames before are opened and lost.
        """
        unpack, digest_of, due = WORDS.unpack_from, xxhash.xxh3_64_intdigest, self._due
        payloads: list[bytes | memoryview] = []
        for frame in frames:
            if len(frame) < SIZE:
                raise FrameError(f"frame of {len(frame)} bytes is shorter than an envelope ({SIZE} bytes)")
            first, sequence, length, digest = unpack(frame)
            payload = frame[SIZE:] if length < LARGE else memoryview(frame)[SIZE:]
            if (
                due.get(first) != sequence
                or length != len(payload)
                or digest_of(payload, first & PRODUCER ^ sequence) != digest
            ):
                self._check(frame, payload)
            due[first] = sequence + 1
            payloads.append(payload)
        return payloads

    def _check(self, frame: bytes, payload: bytes | memoryview) -> None:
        """Say what is wrong with a frame; nothing is with a producer's first."""
        magic, version, producer, sequence, length, digest = HEADER.unpack_from(frame)
        if magic != MAGIC or version != VERSION:
            raise FrameError(f"expected envelope {MAGIC!r} version {VERSION}, found {magic!r} version {version}")
        if length != len(payload):
            raise _damaged(producer, sequence, f"{length} bytes", f"{len(payload)}")
        if digest != (found := xxhash.xxh3_64_intdigest(payload, producer << 48 ^ sequence)):
            raise _damaged(producer, sequence, f"hash {digest:#018x}", f"{found:#018x}")
        due = self._due.get(WORDS.unpack_from(frame)[0], 0)
        if sequence != due:
            raise FrameError(f"producer {producer}: expected frame {due}, found frame {sequence}")


def _damaged(producer: int, sequence: int, expected: str, found: str) -> FrameError:
    return FrameError(f"frame {sequence} of producer {producer}: expected {expected}, found {found}")
