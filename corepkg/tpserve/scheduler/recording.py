"""The recording of a rank: all that it decided from, and all that it decided.

A rank is a function of its messages and of the tokens that its engine draws. A recording holds these, round by round,
so that :mod:`tpserve.scheduler.replay` can decide it all again without a model.

    "TPSVREC3" | record | record | …  record:  length u32 | hash of the payload u64 | hash of these two u64 | payload …

Integers are little-endian, hashes xxh3-64 seeded with the number of the record. The first payload is a :class:`Header`,
each other a :class:`RecordedRound`; msgpack both. An empty payload is the last one, so that a recording of which the
end is missing, as when a rank is killed, is told from a whole one; the length has a hash of its own, so that a damaged
record is told from one that is cut off.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from tpserve.errors import UserError
from tpserve.messages import Abort, Generate, Shutdown
from tpserve.scheduler.digest import DecisionLog, RoundDecisions
from tpserve.scheduler.round import Round
from tpserve.scheduler.scheduler import Budget
from tpserve.step import EngineLimits
from tpserve.tokens import ITEM

__all__ = ["Header", "RecordedRound", "Recorder", "Recording", "RecordingError"]

MAGIC = b"TPSVREC3"
CLAIM = struct.Struct("<IQ")
PREFIX_SIZE = CLAIM.size + 8

LONGEST = 1 << 30
"""Bytes of the longest payload: nothing that reads a recording makes room for more."""

R = TypeVar("R", bound=msgspec.Struct)

logger = logging.getLogger(__name__)


class RecordingError(UserError):
    """A recording cannot be written or read."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the decisions depend on besides the messages.

    Attributes:
        version: of the tpserve that recorded.
        model: name of the model.
        shape: of the model; for people.
        limits: what the engine had.
        budget: what the scheduler was told.
        policy: name of the policy that decided.
        options: about it.
        provider: the distribution that it came from, with version.
        tokenizers: how many Shutdown messages end the run.
    """

    version: str
    model: str
    shape: dict[str, Any]
    limits: EngineLimits
    budget: Budget
    policy: str
    options: dict[str, Any]
    provider: str
    tokenizers: Annotated[int, Meta(ge=1)]


class RecordedRound(msgspec.Struct, frozen=True):
    """One round.

    Attributes:
        number: from 0, without gaps.
        messages: that came in it.
        decisions: all that followed; the tokens drawn are among them.
        digest: of all decisions so far.
    """

    number: int
    messages: list[Generate | Abort | Shutdown]
    decisions: RoundDecisions
    digest: int


class Recorder:
    """Writes a recording; what was added survives if this process is killed.

    A disk that takes no more ends the recording, with an error in the log, and nothing else.

    Args:
        path: where to; what is there is overwritten.
        header: the first record.
        log: the decisions and their digest.

    Raises:
        RecordingError: ``path`` cannot be written.
    """

    def __init__(self, path: Path, header: Header, log: DecisionLog) -> None:
        self._path = path
        self._log = log
        self._records = 0
        try:
            self._file: FileIO | None = FileIO(path, "wb", opener=_open_private)
            self._file.write(MAGIC)
        except OSError as error:
            raise RecordingError(f"{path} cannot be written: {error.strerror}", "Choose another file") from None
        self._write(header)

    def add(self, arrived: Round, decisions: RoundDecisions) -> None:
        """Write a round that has just been folded into the log."""
        self._write(RecordedRound(arrived.number, arrived.messages, decisions, self._log.latest[1]))

    def close(self) -> None:
        """Write the end and close the file. May be called twice."""
        self._write_payload(b"")
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Header | RecordedRound) -> None:
        if self._file is not None:
            self._write_payload(msgspec.msgpack.encode(record))

    def _write_payload(self, payload: bytes) -> None:
        if self._file is not None and (reason := self._append(self._file, payload)):
            logger.error("the recording %s ends here: %s", self._path, reason)
            self._file.close()
            self._file = None

    def _append(self, file: FileIO, payload: bytes) -> str:
        """Write a record; why it is not whole, if it is not."""
        if len(payload) > LONGEST:
            return f"a record would have {len(payload)} bytes"
        digest = xxhash.xxh3_64_intdigest(payload, self._records)
        record = _prefix(len(payload), digest, self._records) + payload
        self._records += 1
        try:
            return "" if file.write(record) == len(record) else "the disk is full"
        except OSError as error:
            return error.strerror or str(error)


def _open_private(path: str, flags: int) -> int:
    """Open a file for nobody else's eyes: it holds what clients say."""
    return os.open(path, flags, 0o600)


def _flaw(record: RecordedRound, number: int) -> str:
    """What no rank can have decided from, in one line; empty if there is nothing of the kind."""
    if record.number != number:
        return f"round {record.number} stands in the place of round {number}"
    for message in record.messages:
        if isinstance(message, Generate):
            if len(message.prompt_ids) % ITEM or len(message.output_ids) % ITEM:
                return f"request {message.uid} has half a token"
            if message.params.seed is None or message.params.max_tokens is None:
                return f"request {message.uid} has no seed, or no end"
    return ""


def _prefix(length: int, digest: int, number: int) -> bytes:
    """What stands before the payload of record ``number``."""
    claim = CLAIM.pack(length, digest)
    return claim + xxhash.xxh3_64_intdigest(claim, number).to_bytes(8, "little")


class Recording:
    """Reads a recording, once.

    Args:
        path: the file.

    Attributes:
        header: its first record.
        is_cut_off: whether its end is missing, as after a kill; known when all rounds have been read.

    Raises:
        RecordingError: it cannot be read, or is no recording.
    """

    def __init__(self, path: Path) -> None:
        self.is_cut_off = False
        self._path = path
        self._records = 0
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
        magic = self._file.read(len(MAGIC))
        if magic[:-1] != MAGIC[:-1]:
            raise RecordingError(f"{path} is no recording", "tpserve launch --record FILE writes one")
        if magic != MAGIC:
            raise RecordingError(f"{path} is a recording of another version", "Replay it with the one that wrote it")
        header = self._read(Header)
        if header is None:
            raise RecordingError(f"{path} ends in its first record")
        self.header = header

    def rounds(self) -> Iterator[RecordedRound]:
        """The rounds that are whole.

        Raises:
            RecordingError: one is damaged, or there is none.
        """
        with self._file:
            while (found := self._read(RecordedRound)) is not None:
                flaw = _flaw(found, self._records - 2)
                if flaw:
                    raise RecordingError(f"{self._path}: record {self._records - 1} is none that a rank writes: {flaw}")
                yield found
            if not self.is_cut_off and self._file.read(1):
                raise RecordingError(f"{self._path} goes on behind its end", "Give each recording a file of its own")
        if self._records == 1:
            raise RecordingError(f"{self._path} ends before the first round is whole", "There is nothing to replay")

    def _read(self, type_: type[R]) -> R | None:
        payload = self._payload()
        if payload is None:
            return None
        try:
            found = msgspec.msgpack.decode(payload, type=type_)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RecordingError(
                f"{self._path}: record {self._records} is of another version, or forged: {error}"
            ) from None
        self._records += 1
        return found

    def _payload(self) -> bytes | None:
        """The next record's payload; None if it is the end, or if the file ends before or in the record."""
        prefix = self._file.read(PREFIX_SIZE)
        if len(prefix) < PREFIX_SIZE:
            self.is_cut_off = True
            return None
        length, digest = CLAIM.unpack_from(prefix)
        if length > LONGEST or prefix != _prefix(length, digest, self._records):
            raise self._damaged()
        payload = self._file.read(length)
        if len(payload) < length:
            self.is_cut_off = True
            return None
        if xxhash.xxh3_64_intdigest(payload, self._records) != digest:
            raise self._damaged()
        return payload or None

    def _damaged(self) -> RecordingError:
        return RecordingError(f"{self._path}: record {self._records} is damaged")
