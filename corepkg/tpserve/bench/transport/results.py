"""What a comparison found: the JSON of ``tpserve bench transport``, from which the other reports are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tpserve.bench.blocks import CutShort
from tpserve.bench.host import About
from tpserve.bench.statistics import Curve, Finding, Ratio
from tpserve.bench.transport.arms import Arm
from tpserve.bench.transport.cases import Case
from tpserve.bench.transport.measure import Failure, Plan

__all__ = ["SCHEMA", "Idle", "Latency", "Measure", "Outcome", "Report", "Verdict", "plain", "read_report"]

SCHEMA = 1
"""Counts changes of the JSON that its readers would notice."""

Measure = Literal["p50", "p99", "throughput"]


class Latency(msgspec.Struct, frozen=True):
    """How long it took until every rank held the messages, in microseconds; None where samples are too few to tell."""

    mean: float
    p50: float
    p90: float | None
    p99: float | None
    p999: float | None
    max: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One arm on one case, over all blocks.

    Attributes:
        arm: the arm's name.
        case: index in ``Report.plan.cases``.
        blocks: how many runs are in here.
        samples: rounds, or messages if they arrive by themselves.
        latency_us: of them.
        block_p50_us: the median of each run, in the order of the runs.
        messages_per_second: that each rank gets; of paced rounds only the time inside counts.
        megabytes_per_second: that each follower gets, 10⁶ bytes each.
        cpu_seconds_per_1000_rounds: of all ranks together.
        peak_memory_mib: the most that a rank's process held, libraries and the messages made beforehand included.
        grown_memory_mib: the most that it took while it ran the rounds.
        lost: messages that a follower did not get.
        agreed: all ranks got the same messages in the same rounds.
        cdf_us: the distribution as (microseconds, share of samples up to that).
    """

    arm: str
    case: int
    blocks: int
    samples: int
    latency_us: Latency
    block_p50_us: list[float]
    messages_per_second: float
    megabytes_per_second: float
    cpu_seconds_per_1000_rounds: float
    peak_memory_mib: float
    grown_memory_mib: float
    lost: int
    agreed: bool
    cdf_us: Curve


class Idle(msgspec.Struct, frozen=True):
    """What waiting costs: percent of a core for each rank, the leader's first."""

    arm: str
    cpu_percent: list[float]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One arm against the baseline in one respect.

    Attributes:
        case: index in ``Report.plan.cases``.
        baseline: an arm's name.
        arm: another's.
        measure: latency at a quantile; or messages a second, rounds if they are empty.
        ratio: the arm's over the baseline's, with its 95 % interval.
        verdict: less or more; or if the interval includes 1 no difference, or that it cannot be told.
    """

    case: int
    baseline: str
    arm: str
    measure: Measure
    ratio: Ratio
    verdict: Finding

    @property
    def is_good(self) -> bool:
        """The arm is better than the baseline."""
        return self.verdict == ("more" if self.measure == "throughput" else "less")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found, and all that is needed to run it again.

    Attributes:
        bench: which bench this is from.
        schema: SCHEMA at the time.
        argv: the command line.
        about: where and with what.
        plan: what was measured, with every option of every part and the seed.
        cut_short: by which signal after how many of the plan's blocks; None if it ran to its end.
        order: for each block the arms in the order in which they ran.
        outcomes: by case, then by arm.
        idle: by arm; empty if it was not measured.
        verdicts: by case and arm, where both ran at least twice and have samples enough; the baseline is the first arm.
        failures: runs that broke off.
    """

    bench: Literal["transport"] = "transport"
    schema: int = SCHEMA
    argv: list[str]
    about: About
    plan: Plan
    cut_short: CutShort | None = None
    order: list[list[str]]
    outcomes: list[Outcome]
    idle: list[Idle]
    verdicts: list[Verdict]
    failures: list[Failure]

    @property
    def arms(self) -> list[Arm]:
        """The arms, baseline first."""
        return self.plan.arms

    @property
    def cases(self) -> list[Case]:
        """The cases."""
        return self.plan.cases

    @property
    def blocks(self) -> int:
        """How many there are in here."""
        return len(self.order)

    @property
    def is_unsure(self) -> bool:
        """There is something that more blocks might tell."""
        return any(found.verdict == "cannot tell" for found in self.verdicts)

    @property
    def is_sound(self) -> bool:
        """Every run went through, and nothing was lost."""
        return not self.failures and all(outcome.agreed and not outcome.lost for outcome in self.outcomes)

    @property
    def says_nothing(self) -> bool:
        """Arms ran, but so few times that none can be held against another."""
        return len(self.arms) > 1 and bool(self.outcomes) and max(found.blocks for found in self.outcomes) < 2

    def outcome(self, case: int, arm: str) -> Outcome | None:
        """An arm's outcome on a case; None if every run of it broke off."""
        return next((found for found in self.outcomes if (found.case, found.arm) == (case, arm)), None)

    def verdicts_on(self, case: int, arm: str) -> list[Verdict]:
        """What can be said of an arm on a case."""
        return [found for found in self.verdicts if (found.case, found.arm) == (case, arm)]

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.format(msgspec.json.encode(self, enc_hook=plain), indent=1) + b"\n"


def read_report(path: Path) -> Report:
    """Read what :meth:`Report.encode` made.

    Raises:
        msgspec.ValidationError: it is no such report.
    """
    return msgspec.json.decode(path.read_bytes(), type=Report, dec_hook=_read)


def plain(value: object) -> str:
    """What msgspec does not know how to write in JSON: a path."""
    assert isinstance(value, Path), value
    return str(value)


def _read(type_: type, value: str) -> Path:
    assert type_ is Path, type_
    return Path(value)
