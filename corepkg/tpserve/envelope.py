"""The envelope around every message: written once by its producer, opaque to transports, checked by every reader.

    0        4        6        8                16               24               32
    | "TPSV" | version| producer|  sequence     |  length        |  xxh3-64       | payload …

All integers are little-endian and unsigned. The hash covers the first 24 bytes and the payload, so a frame
cannot be cut, altered or attributed to another producer without notice. Sequence numbers of one producer start
at 0 and have no gaps, so a frame cannot be lost without notice either.
"""

from __future__ import annotations

import struct

import xxhash

from tpserve.errors import FrameError

__all__ = ["Envelope", "Opener", "Sealer"]

MAGIC = b"TPSV"
VERSION = 1
HEAD = struct.Struct("<4sHHQQ")
HASH = struct.Struct("<Q")
SIZE = HEAD.size + HASH.size


class Envelope:
    """One checked frame.

    Attributes:
        producer: who wrote it, 0 … 65535.
        sequence: its number among the producer's frames.
        payload: the message, as a view into the frame.
    """

    __slots__ = ("payload", "producer", "sequence")

    def __init__(self, producer: int, sequence: int, payload: memoryview) -> None:
        self.producer = producer
        self.sequence = sequence
        self.payload = payload

    @classmethod
    def parse(cls, frame: bytes) -> Envelope:
        """Check a frame's form and hash.

        Raises:
            FrameError: it is not an envelope of this version, or it is damaged.
        """
        if len(frame) < SIZE:
            raise FrameError(f"frame of {len(frame)} bytes is shorter than an envelope ({SIZE} bytes)")
        magic, version, producer, sequence, length = HEAD.unpack_from(frame)
        if magic != MAGIC or version != VERSION:
            raise FrameError(f"expected envelope {MAGIC!r} version {VERSION}, found {magic!r} version {version}")
        payload = memoryview(frame)[SIZE:]
        if length != len(payload):
            raise FrameError(f"frame {sequence} of producer {producer}: expected {length} bytes, found {len(payload)}")
        (expected,) = HASH.unpack_from(frame, HEAD.size)
        found = _digest(memoryview(frame)[: HEAD.size], payload)
        if found != expected:
            raise FrameError(
                f"frame {sequence} of producer {producer}: expected hash {expected:#018x}, found {found:#018x}"
            )
        return cls(producer, sequence, payload)


class Sealer:
    """Writes the envelopes of one producer, numbering them from 0."""

    def __init__(self, producer: int) -> None:
        self.producer = producer
        self.sequence = 0

    def seal(self, payload: bytes) -> bytes:
        """Put a message into the next envelope."""
        head = HEAD.pack(MAGIC, VERSION, self.producer, self.sequence, len(payload))
        self.sequence += 1
        return b"".join((head, HASH.pack(_digest(head, payload)), payload))


class Opener:
    """Reads the envelopes of any number of producers and holds each to its sequence."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def open(self, frame: bytes) -> memoryview:
        """Check a frame and return its message.

        Raises:
            FrameError: it is damaged, or not the producer's next one.
        """
        envelope = Envelope.parse(frame)
        expected = self._next.get(envelope.producer, 0)
        if envelope.sequence != expected:
            raise FrameError(
                f"producer {envelope.producer}: expected frame {expected}, found frame {envelope.sequence}"
            )
        self._next[envelope.producer] = expected + 1
        return envelope.payload


def _digest(head: bytes | memoryview, payload: bytes | memoryview) -> int:
    hasher = xxhash.xxh3_64(head)
    hasher.update(payload)
    return hasher.intdigest()
