"""The decision digest: how ranks notice, a round later, that they have not decided the same.

Every rank folds all decisions of a finished round into a rolling 64-bit hash. Announcements carry the leader's, and a
follower compares it with its own as soon as it has finished that round. The decisions of the last rounds are kept, so
that the two lists can be laid side by side afterwards.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from tpserve.errors import Divergence, RankError
from tpserve.messages import FinishReason

__all__ = ["DecisionLog", "Difference", "RoundDecisions", "dump_path", "first_decision", "first_difference", "report"]

logger = logging.getLogger(__name__)

WINDOW = 64
LINK = struct.Struct("<qq")
BEGUN = ("uids", "pages", "lengths", "retracted")
"""What is decided of a round before it is computed."""


class RoundDecisions(msgspec.Struct, frozen=True):
    """All that a rank decided in one round; the lists run in batch order, one entry for each request in the batch.

    Attributes:
        uids: the requests.
        pages: the KV pages newly given to each.
        lengths: how many tokens of each are cached when the round is over.
        tokens: the token drawn for each, or -1.
        finished: why each finished, or None.
        retracted: requests that had to give their pages up.
    """

    uids: list[int] = []
    pages: list[list[int]] = []
    lengths: list[int] = []
    tokens: list[Annotated[int, Meta(ge=-1, lt=1 << 31)]] = []
    finished: list[FinishReason | None] = []
    retracted: list[int] = []


class LoggedRound(msgspec.Struct, frozen=True):
    """One entry of a dump. A round that is not finished has no digest, and its tokens are not known."""

    round: int
    digest: int | None
    decisions: RoundDecisions


class Dump(msgspec.Struct, frozen=True):
    """What a rank leaves in the run directory: its last rounds, oldest first."""

    rank: int
    rounds: list[LoggedRound]


class Difference(msgspec.Struct, frozen=True):
    """The first decision that two ranks took differently.

    Attributes:
        round: in which round.
        ranks: the two ranks.
        decision: what differs: ``tokens[3] of request 17``, say.
        found: what each of the two decided.
    """

    round: int
    ranks: tuple[int, int]
    decision: str
    found: tuple[object, object]

    def __str__(self) -> str:
        return (
            f"round {self.round}: {self.decision} differs: "
            f"rank {self.ranks[0]} has {self.found[0]}, rank {self.ranks[1]} has {self.found[1]}"
        )


class DecisionLog:
    """One rank's decisions and their rolling digest.

    Args:
        rank: whose decisions these are.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._round = -1
        self._digest = 0
        self._digests: dict[int, int] = {}
        self._kept: deque[tuple[int, int, bytes]] = deque(maxlen=WINDOW)
        self._expected: dict[int, int] = {}

    @property
    def latest(self) -> tuple[int, int]:
        """The newest finished round and the digest as of it, signed 64-bit; (-1, 0) before the first."""
        return self._round, self._digest

    def fold(self, round: int, decisions: RoundDecisions) -> None:
        """Add a finished round; rounds are finished in order, none left out.

        Raises:
            Divergence: the leader decided otherwise in this round.
        """
        assert round == self._round + 1, f"round {round} folded after round {self._round}"
        encoded = msgspec.msgpack.encode(decisions)
        hasher = xxhash.xxh3_64(LINK.pack(self._digest, round))
        hasher.update(encoded)
        self._round, self._digest = round, _signed(hasher.intdigest())
        self._keep(round, self._digest, encoded)
        expected = self._expected.pop(round, None)
        if expected is not None:
            self._compare(round, expected)

    def expect(self, round: int, digest: int) -> None:
        """Hold ``round`` to the leader's digest: now if it is finished, else when it is.

        Raises:
            Divergence: it is finished and differs.
            RankError: it was finished more than 64 rounds ago, so nothing can be said of it.
        """
        if round < 0:
            return
        if round > self._round:
            self._expected[round] = digest
        elif round in self._digests:
            self._compare(round, digest)
        else:
            raise RankError(self.rank, self._round, f"a digest of one of the last {WINDOW} rounds", f"round {round}")

    def dump(self, path: Path, begun: Mapping[int, RoundDecisions] = {}) -> None:
        """Write the kept rounds as JSON, for :func:`first_difference`; all at once, from any thread.

        If they cannot be written, the log says so: whoever dumps has something worse to tell, or to end.

        Args:
            path: the file.
            begun: what is decided of rounds that are not finished, by number.
        """
        rounds = [
            LoggedRound(number, digest, msgspec.msgpack.decode(encoded, type=RoundDecisions))
            for number, digest, encoded in list(self._kept)
        ]
        rounds += [LoggedRound(number, None, decisions) for number, decisions in begun.items() if number > self._round]
        unfinished = path.with_suffix(".part")
        try:
            unfinished.write_bytes(msgspec.json.encode(Dump(self.rank, rounds)))
            unfinished.rename(path)
        except OSError as error:
            logger.warning("the last decisions cannot be written: %s", error)

    def _keep(self, round: int, digest: int, encoded: bytes) -> None:
        if len(self._kept) == WINDOW:
            del self._digests[self._kept[0][0]]
        self._kept.append((round, digest, encoded))
        self._digests[round] = digest

    def _compare(self, round: int, expected: int) -> None:
        found = self._digests[round]
        if found != expected:
            raise Divergence(self.rank, round, f"the leader's digest {expected:#x}", f"{found:#x}")


def dump_path(run_dir: Path, rank: int) -> Path:
    """Where a rank that stops with an error dumps its log."""
    return run_dir / f"decisions-rank{rank}.json"


def first_difference(dump_a: Path, dump_b: Path) -> Difference | None:
    """Lay two dumps side by side and find the first decision that differs; None if none does.

    Rounds that only one of the two still has, or has begun, are left out.
    """
    a = msgspec.json.decode(dump_a.read_bytes(), type=Dump)
    b = msgspec.json.decode(dump_b.read_bytes(), type=Dump)
    others = {entry.round: entry for entry in b.rounds}
    for mine in a.rounds:
        other = others.get(mine.round)
        if other is None or mine.digest == other.digest is not None:
            continue
        if mine.digest is None or other.digest is None:
            difference = first_decision(mine.decisions, other.decisions, BEGUN)
        else:
            difference = first_decision(mine.decisions, other.decisions) or (
                "a decision before the rounds that were kept",
                (f"digest {mine.digest:#x}", f"digest {other.digest:#x}"),
            )
        if difference is not None:
            return Difference(mine.round, (a.rank, b.rank), *difference)
    return None


def report(run_dir: Path) -> list[str]:
    """One line for each rank whose dump in ``run_dir`` differs from rank 0's; empty if there is nothing to compare."""
    leader = dump_path(run_dir, 0)
    if not leader.exists():
        return []
    others = sorted(run_dir.glob("decisions-rank*.json"))
    differences = [first_difference(leader, path) for path in others if path != leader]
    return [str(difference) for difference in differences if difference is not None]


def first_decision(
    a: RoundDecisions, b: RoundDecisions, fields: Sequence[str] = RoundDecisions.__struct_fields__
) -> tuple[str, tuple[object, object]] | None:
    """The first decision of a round that differs, and what it is in either; None if none of ``fields`` does."""
    for field in fields:
        for index, found in enumerate(zip_longest(getattr(a, field), getattr(b, field), fillvalue="nothing")):
            if found[0] != found[1]:
                owner = f" of request {a.uids[index]}" if field != "uids" and index < len(a.uids) else ""
                return f"{field}[{index}]{owner}", found
    return None


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
