"""A comparison's outcome as tables in a terminal."""

from __future__ import annotations

from rich.console import Console, Group
from rich.text import Text

from tpserve.bench.terminal import Grid
from tpserve.bench.transport.cases import Load
from tpserve.bench.transport.results import Outcome, Report, Verdict

__all__ = ["UNSURE", "conditions", "print_report", "say_load"]

UNSURE = "cannot tell: more --repeats make intervals narrower"


HEADING = ("arm", "p50 µs", "p90", "p99", "p99.9", "msg/s", "MB/s", "CPU s/1k", "MiB", "lost")


def print_report(report: Report, console: Console) -> None:
    """Print everything of a report that fits in a terminal."""
    console.print(Text(conditions(report), style="dim"))
    for case in range(len(report.cases)):
        console.print(_case(report, case))
    if report.cut_short:
        console.print(Text(report.cut_short.say(report.plan.blocks), style="bold red"))
    if report.is_unsure:
        console.print(Text(UNSURE, style="dim"))
    if report.says_nothing:
        console.print(Text("no verdict: one block says nothing", style="dim"))
    if report.idle:
        console.print(_idle(report))
    for failure in report.failures:
        console.print(Text(f"block {failure.block} of {failure.arm} broke off: {failure.error}", style="red"))
    if not report.is_sound:
        console.print(Text("messages were lost, or runs broke off: no figure above can be trusted", style="bold red"))


def conditions(report: Report) -> str:
    """Under which conditions it was measured, in one line."""
    plan, about = report.plan, report.about
    return (
        f"{plan.ranks} ranks, {report.blocks} blocks, {say_load(plan.load)}, seed {plan.seed}; {about.cpu}, "
        f"{about.cores} cores, load {about.load[0]:.1f}"
    )


def say_load(load: Load) -> str:
    """A load in words."""
    match load.pace:
        case "paced":
            apart = f" {load.gap:g} µs apart" if load.gap else ""
            return "paced rounds" + apart + (f" after steps of {load.step:g} µs" if load.step else "")
        case "free":
            return "free-running rounds"
        case "poisson":
            return f"{load.rate:g} messages/s at random"
        case "burst":
            return f"{load.rate:g} messages/s in bursts"
        case "trace":
            return f"messages as in {load.trace}"


def _case(report: Report, index: int) -> Group:
    case = report.cases[index]
    outcomes = [report.outcome(index, arm.name) for arm in report.arms]
    rows = [[outcome.arm, *_figures(outcome)] for outcome in outcomes if outcome is not None]
    figures = Grid(HEADING, rows, figures=len(HEADING))
    verdicts = [found for arm in report.arms if (found := report.verdicts_on(index, arm.name))]
    many = f"{case.rounds * case.messages} arrivals" if report.plan.load.is_timed else f"{case.rounds} rounds"
    title = Text(f"{case}, {many} a block", style="bold")
    return Group("", title, figures, *([_verdicts(verdicts)] if verdicts else []))


def _figures(outcome: Outcome) -> list[str]:
    latency = outcome.latency_us
    return [
        *(_number(value) for value in (latency.p50, latency.p90, latency.p99, latency.p999)),
        _number(outcome.messages_per_second or None),
        _number(outcome.megabytes_per_second or None),
        f"{outcome.cpu_seconds_per_1000_rounds:.3f}",
        f"{outcome.peak_memory_mib:.0f}",
        str(outcome.lost) if outcome.agreed else f"{outcome.lost}, differ",
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 100_000:
        return f"{value / 1e6:,.3g}M" if value >= 1e6 else f"{value / 1e3:.0f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _verdicts(verdicts: list[list[Verdict]]) -> Grid:
    heading = [f"over {verdicts[0][0].baseline}", *(verdict.measure for verdict in verdicts[0])]
    rows = [
        [Text(found[0].arm), *(Text(str(verdict.ratio), style=_style(verdict)) for verdict in found)]
        for found in verdicts
    ]
    return Grid(heading, rows)


def _style(verdict: Verdict) -> str:
    if not verdict.ratio.is_difference:
        return "dim"
    return "green" if verdict.is_good else "red"


def _idle(report: Report) -> Group:
    ranks = report.plan.ranks
    heading = ["arm", *(f"rank {rank}" for rank in range(ranks))]
    rows = [[idle.arm, *(f"{share:.2f}" for share in idle.cpu_percent)] for idle in report.idle]
    return Group("", Text("idle, CPU in percent of a core", style="bold"), Grid(heading, rows, figures=ranks))
