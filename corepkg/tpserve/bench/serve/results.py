"""What a comparison found: the JSON of ``tpserve bench serve``, from which the other reports are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tpserve.bench.blocks import CutShort
from tpserve.bench.host import About
from tpserve.bench.serve.arrivals import Rate
from tpserve.bench.serve.counters import Counts
from tpserve.bench.serve.measure import Plan, Run
from tpserve.bench.statistics import Curve, Finding, Ratio

__all__ = ["SCHEMA", "Latency", "Measure", "Outcome", "Report", "Verdict", "label", "read_report"]

SCHEMA = 1
"""Counts changes of the JSON that its readers would notice."""

Measure = Literal["output_throughput", "ttft", "tpot", "itl", "e2el"]
"""Output tokens a second; time to first token; time per output token after the first, a figure a request; latency
between pieces of text, one for each; latency from the arrival to the last of the text. As in vLLM's bench."""

TITLES: dict[Measure, str] = {
    "output_throughput": "output tokens/s",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2E",
}


def label(measure: Measure, figure: str) -> str:
    """What a row that shows a figure is called."""
    return TITLES[measure] if measure == "output_throughput" else f"{TITLES[measure]} {figure}"


class Latency(msgspec.Struct, frozen=True):
    """A distribution, in milliseconds.

    Attributes:
        samples: how many.
        figures: ``mean``, then percentiles such as ``p50``; None where samples are too few to tell.
        cdf: as (milliseconds, share of samples up to that).
    """

    samples: int
    figures: dict[str, float | None]
    cdf: Curve


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One arm at one rate, over all blocks.

    Attributes:
        arm: the arm's name.
        rate: requests a second that arrived; None: all at once.
        seconds: from the first arrival to the last text, of all blocks together.
        completed: requests that were answered.
        failed: those that were not.
        errors: how often each was said.
        request_throughput: answered requests a second.
        output_throughput: their output tokens a second.
        total_throughput: their prompts' and output tokens a second.
        latency_ms: by measure; without those that have no samples.
        late_ms: how late the client was in sending, 99th percentile.
        client: tokens by the server's answers to the client.
        server: tokens by the server's metrics; None if it has none.
    """

    arm: str
    rate: Rate
    seconds: float
    completed: int
    failed: int
    errors: dict[str, int]
    request_throughput: float
    output_throughput: float
    total_throughput: float
    latency_ms: dict[Measure, Latency]
    late_ms: float
    client: Counts
    server: Counts | None

    @property
    def agrees(self) -> bool:
        """The server counted what the client did, or does not tell."""
        return self.server in (None, self.client)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The second arm against the first in one respect.

    Attributes:
        rate: at which.
        measure: what is compared.
        figure: which of its figures.
        ratio: the second's over the first's, with its 95 % interval.
        verdict: less or more; or if the interval includes 1 no difference, or that it cannot be told.
    """

    rate: Rate
    measure: Measure
    figure: str
    ratio: Ratio
    verdict: Finding

    @property
    def tone(self) -> Literal["good", "bad", "quiet"]:
        """Whether it is good news."""
        return self.ratio.tone(more_is_better=self.measure == "output_throughput")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found, and all that is needed to run it again.

    Attributes:
        bench: which bench this is from.
        schema: SCHEMA at the time.
        argv: the command line.
        about: where and with what.
        plan: what was measured, with the seed.
        cut_short: by which signal after how many of the plan's blocks; None if it ran to its end.
        order: for each block the arms in the order in which they ran.
        outcomes: by rate, then by arm.
        verdicts: by rate; none with one arm or one block.
        runs: every request of every run.
    """

    bench: Literal["serve"] = "serve"
    schema: int = SCHEMA
    argv: list[str]
    about: About
    plan: Plan
    cut_short: CutShort | None = None
    order: list[list[str]]
    outcomes: list[Outcome]
    verdicts: list[Verdict]
    runs: list[Run]

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
        """Every arm has answered something at every rate."""
        return all(outcome.completed for outcome in self.outcomes)

    def outcomes_at(self, rate: Rate) -> list[Outcome]:
        """Of all arms, the baseline first."""
        return [outcome for outcome in self.outcomes if outcome.rate == rate]

    def verdict(self, rate: Rate, measure: Measure, figure: str) -> Verdict | None:
        """What can be said of a figure, if anything."""
        wanted = (rate, measure, figure)
        return next((found for found in self.verdicts if (found.rate, found.measure, found.figure) == wanted), None)

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self) + b"\n"


def read_report(path: Path) -> Report:
    """Read what :meth:`Report.encode` made.

    Raises:
        msgspec.ValidationError: it is no such report.
    """
    return msgspec.json.decode(path.read_bytes(), type=Report)
