"""The recording of a rank: all that it decided from, and all that it decided.

A rank is a function of its messages and of the tokens that its engine draws. A recording holds these, round by round,
so that :mod:`tpserve.scheduler.replay` can decide it all again without a model.

    "TPSVREC1" | record | record | …        record:  length u32 | xxh3-64 of the payload u64 | payload …

Integers are little-endian. The first payload is a :class:`Header`, each other a :class:`RecordedRound`; msgpack both.
The hash is seeded with the number of the record.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from tpserve.errors import UserError
from tpserve.messages import Abort, Generate, Shutdown
from tpserve.scheduler.digest import DecisionLog, RoundDecisions
from tpserve.scheduler.round import Round
from tpserve.scheduler.scheduler import Budget
from tpserve.step import EngineLimits

__all__ = ["Header", "RecordedRound", "Recorder", "Recording", "RecordingError"]

MAGIC = b"TPSVREC1"
PREFIX = struct.Struct("<IQ")

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
    tokenizers: int


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
        """Close the file. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Header | RecordedRound) -> None:
        if self._file is None:
            return
        payload = msgspec.msgpack.encode(record)
        digest = xxhash.xxh3_64_intdigest(payload, self._records)
        self._records += 1
        record_bytes = PREFIX.pack(len(payload), digest) + payload
        try:
            is_whole = self._file.write(record_bytes) == len(record_bytes)
            reason = "the disk is full"
        except OSError as error:
            is_whole, reason = False, error.strerror or str(error)
        if not is_whole:
            logger.error("the recording %s ends here: %s", self._path, reason)
            self.close()


def _open_private(path: str, flags: int) -> int:
    """Open a file for nobody else's eyes: it holds what clients say."""
    return os.open(path, flags, 0o600)


class Recording:
    """Reads a recording, once.

    Args:
        path: the file.

    Attributes:
        header: its first record.
        is_cut_off: whether its last record is not whole, as after a kill; known when all rounds have been read.

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
        if self._file.read(len(MAGIC)) != MAGIC:
            raise RecordingError(f"{path} is no recording", "tpserve launch --record FILE writes one")
        header = self._read(Header)
        if header is None:
            raise RecordingError(f"{path} ends in its first record")
        self.header = header

    def rounds(self) -> Iterator[RecordedRound]:
        """The rounds that are whole.

        Raises:
            RecordingError: one is damaged.
        """
        with self._file:
            while (found := self._read(RecordedRound)) is not None:
                yield found

    def _read(self, type_: type[R]) -> R | None:
        prefix = self._file.read(PREFIX.size)
        length, expected = PREFIX.unpack(prefix) if len(prefix) == PREFIX.size else (1, 0)
        payload = self._file.read(length)
        if len(payload) < length:
            self.is_cut_off = bool(prefix)
            return None
        if xxhash.xxh3_64_intdigest(payload, self._records) != expected:
            raise RecordingError(f"{self._path}: record {self._records} is damaged")
        self._records += 1
        try:
            return msgspec.msgpack.decode(payload, type=type_)
        except msgspec.MsgspecError as error:
            raise RecordingError(f"{self._path}: record {self._records - 1} is of another version: {error}") from None
