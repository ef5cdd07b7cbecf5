"""A comparison's outcome as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tpserve.bench.page import cell
from tpserve.bench.serve.arrivals import Rate, say_rate
from tpserve.bench.serve.results import Measure, Outcome, Report, label

__all__ = ["conditions", "figures", "notes", "print_report"]

STYLES = {"good": "green", "bad": "red", "quiet": "dim"}
LATE = 0.1
"""The share of the mean time to first token by which a client may be late before that is worth a word."""


def print_report(report: Report, console: Console) -> None:
    """Print everything of a report that fits in a terminal."""
    console.print(Text(conditions(report), style="dim"))
    for arm in report.plan.arms:
        console.print(Text(f"{arm.name}: {arm}"))
    for rate in report.plan.rates:
        console.print(_rate(report, rate))
    if len(report.plan.arms) > 1 and not report.verdicts:
        console.print(Text("no verdict: one block cannot tell a difference from chance", style="dim"))


def conditions(report: Report) -> str:
    """Under which conditions it was measured, in one line."""
    plan, about, load = report.plan, report.about, report.plan.workload
    if load.dataset == "random":
        vary = f" ±{100 * load.range_ratio:g} %" if load.range_ratio else ""
        what = f"{load.num_prompts} random prompts of {load.input_len} tokens, {load.output_len} out{vary}"
    else:
        what = f"{load.num_prompts} prompts of {load.dataset_path}"
    limit = f", at most {plan.max_concurrency} at a time" if plan.max_concurrency else ""
    blocks = f"{plan.blocks} block" + "s" * (plan.blocks > 1)
    return f"{what}{limit}; {blocks}, seed {plan.seed}; {about.cpu}, {about.cores} cores, load {about.load[0]:.1f}"


def figures(outcome: Outcome) -> Iterator[tuple[Measure, str, float | None]]:
    """What can be compared of an outcome: measure, figure and value."""
    yield "output_throughput", "mean", outcome.output_throughput
    for measure, latency in outcome.latency_ms.items():
        for figure, value in latency.figures.items():
            yield measure, figure, value


def notes(outcomes: Sequence[Outcome]) -> Iterator[tuple[bool, str]]:
    """What else is to be said of one rate: whether it is bad, and what."""
    for outcome in outcomes:
        if outcome.server is None:
            yield False, f"{outcome.arm} has no metrics to check the client's count: {outcome.client}"
        elif outcome.agrees:
            yield False, f"{outcome.arm} counted what the client did: {outcome.server}"
        else:
            yield True, f"{outcome.arm} counted {outcome.server}, and the client {outcome.client}"
        ttft = outcome.latency_ms.get("ttft")
        if ttft and outcome.late_ms > LATE * (ttft.figures["mean"] or 0):
            yield True, f"{outcome.arm}: the client was up to {outcome.late_ms:.0f} ms late in sending"
        for error, count in outcome.errors.items():
            requests = "1 request" if count == 1 else f"{count} requests"
            yield True, f"{outcome.arm}: {requests} failed: {error}"


def _rate(report: Report, rate: Rate) -> Group:
    outcomes = report.outcomes_at(rate)
    title = Text(f"arriving {say_rate(rate)}", style="bold")
    said = [Text(text, style="red" if is_bad else "dim") for is_bad, text in notes(outcomes)]
    return Group("", title, _table(report, rate, outcomes), *said)


def _table(report: Report, rate: Rate, outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("ms, if not said", no_wrap=True)
    for outcome in outcomes:
        table.add_column(outcome.arm, justify="right", no_wrap=True)
    if report.verdicts:
        table.add_column(f"{outcomes[1].arm} over {outcomes[0].arm}", no_wrap=True)
    table.add_row("answered", *(f"{outcome.completed:,}" for outcome in outcomes))
    if any(outcome.failed for outcome in outcomes):
        table.add_row("failed", *(Text(f"{outcome.failed:,}", style="red") for outcome in outcomes))
    table.add_row("requests/s", *(cell(outcome.request_throughput) for outcome in outcomes))
    table.add_row("all tokens/s", *(cell(outcome.total_throughput) for outcome in outcomes))
    values = [{(measure, figure): value for measure, figure, value in figures(outcome)} for outcome in outcomes]
    for measure, figure in dict.fromkeys(key for found in values for key in found):
        row = [cell(found.get((measure, figure))) for found in values]
        verdict = report.verdict(rate, measure, figure)
        said = [Text(str(verdict.ratio), style=STYLES[verdict.tone])] if verdict else []
        table.add_row(label(measure, figure), *row, *said)
    return table
