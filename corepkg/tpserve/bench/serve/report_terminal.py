"""A comparison's outcome as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.text import Text

from tpserve.bench.page import cell
from tpserve.bench.serve.arrivals import Rate, say_rate
from tpserve.bench.serve.results import Measure, Outcome, Report, label
from tpserve.bench.terminal import Grid

__all__ = ["UNSURE", "conditions", "figures", "notes", "print_report"]

UNSURE = "cannot tell: more --blocks make intervals narrower"
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
    if report.cut_short:
        console.print(Text(report.cut_short.say(report.plan.blocks), style="bold red"))
    if report.is_unsure:
        console.print(Text(UNSURE, style="dim"))
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
    blocks = f"{report.blocks} block" + "s" * (report.blocks > 1)
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


def _table(report: Report, rate: Rate, outcomes: Sequence[Outcome]) -> Grid:
    heading = ["ms, if not said", *(outcome.arm for outcome in outcomes)]
    if report.verdicts:
        heading.append(f"{outcomes[1].arm} over {outcomes[0].arm}")
    rows: list[list[str | Text]] = [["answered", *(f"{outcome.completed:,}" for outcome in outcomes)]]
    if any(outcome.failed for outcome in outcomes):
        rows.append(["failed", *(Text(f"{outcome.failed:,}", style="red") for outcome in outcomes)])
    rows.append(["requests/s", *(cell(outcome.request_throughput) for outcome in outcomes)])
    rows.append(["all tokens/s", *(cell(outcome.total_throughput) for outcome in outcomes)])
    values = [{(measure, figure): value for measure, figure, value in figures(outcome)} for outcome in outcomes]
    for measure, figure in dict.fromkeys(key for found in values for key in found):
        row: list[str | Text] = [label(measure, figure), *(cell(found.get((measure, figure))) for found in values)]
        verdict = report.verdict(rate, measure, figure)
        rows.append([*row, Text(str(verdict.ratio), style=STYLES[verdict.tone])] if verdict else row)
    return Grid(heading, rows, figures=len(outcomes))
