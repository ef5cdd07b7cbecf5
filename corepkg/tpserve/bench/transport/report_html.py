"""A comparison's outcome as a page: latency curves, ratios with intervals, sweeps, and how to repeat it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape

import msgspec

from tpserve.bench.charts import Interval, Series, intervals, key, line_chart, log_axis, style_of, tail_axis
from tpserve.bench.page import cell, details, document, figure, legend, repeat, table
from tpserve.bench.transport.cases import size_text
from tpserve.bench.transport.report_terminal import UNSURE, conditions
from tpserve.bench.transport.results import Measure, Outcome, Report, Verdict, plain

__all__ = ["page"]

MOST_MESSAGE_SWEEPS = 2
WORDS = {"p50": "median latency", "p99": "99th percentile of latency", "throughput": "throughput"}


def page(report: Report) -> str:
    """The whole page; it needs nothing but itself."""
    title = "Rounds: " + " · ".join(arm.name for arm in report.arms[:4]) + (" · …" if len(report.arms) > 4 else "")
    return document(title, [*_head(report), *_sweeps(report), *_cases(report), *_idle(report), *_repeat(report)])


def _head(report: Report) -> Iterator[str]:
    yield "<h1>Rounds over different transports</h1>"
    yield f'<p class="quiet">{escape(conditions(report))}; {escape(report.about.date)}</p>'
    if report.cut_short:
        yield f'<p class="bad">{escape(report.cut_short.say(report.plan.blocks))}.</p>'
    yield (
        "<p>A round begins when the leader has the messages and is over when all ranks hold them, decoded. Arms took "
        "turns in random order, each time in fresh processes; intervals are 95 % bootstrap intervals over blocks.</p>"
    )
    if not report.is_sound:
        yield '<p class="bad">Messages were lost, or runs broke off: no figure here can be trusted.</p>'
    if report.says_nothing:
        yield "<p>No verdict: one block says nothing.</p>"
    if report.is_unsure:
        yield f"<p>{escape(UNSURE)}.</p>"
    for failure in report.failures:
        yield details(f"block {failure.block} of {failure.arm} broke off", failure.error)
    links = "".join(f'<a href="#case{index}">{escape(str(case))}</a>' for index, case in enumerate(report.cases))
    yield f"<nav>{links}</nav>"
    yield legend(arm.name for arm in report.arms)


def _sweeps(report: Report) -> Iterator[str]:
    """Latency and throughput over sizes, and latency over messages a round, where several were measured."""
    by_count: dict[int, list[int]] = {}
    by_size: dict[int, list[int]] = {}
    for index, case in enumerate(report.cases):
        if case.messages:
            by_count.setdefault(case.messages, []).append(index)
            by_size.setdefault(case.size, []).append(index)
    figures = []
    for count, cases in by_count.items():
        if len(cases) > 1:
            name = f"{count} messages a round" if count > 1 else "one message a round"
            figures.append(_sweep(report, cases, name, "size", lambda o: o.latency_us.p50, "median, µs"))
            figures.append(_sweep(report, cases, name, "size", lambda o: o.megabytes_per_second, "MB/s a follower"))
    for size, cases in by_size.items():
        if len(cases) > 1 and len(by_size) <= MOST_MESSAGE_SWEEPS:
            name = f"messages of {size_text(size)}"
            figures.append(_sweep(report, cases, name, "messages", lambda o: o.latency_us.p50, "median, µs"))
    if figures:
        yield "<h2>Sweeps</h2>"
        yield f'<div class="cards">{"".join(figures)}</div>'


def _sweep(report: Report, cases: list[int], name: str, over: str, value: Callable[[Outcome], float], what: str) -> str:
    def place(index: int) -> float:
        case = report.cases[index]
        return float(case.size if over == "size" else case.messages)

    series = [
        Series(
            arm.name,
            style_of(number),
            [(place(index), value(found)) for index in cases if (found := report.outcome(index, arm.name))],
            has_markers=True,
        )
        for number, arm in enumerate(report.arms)
    ]
    present = [line for line in series if line.points]
    title = "bytes of a message" if over == "size" else "messages a round"
    places = [place(index) for index in cases]
    x = log_axis(places, title, _bytes if over == "size" else None, places)
    y = log_axis([point[1] for line in present for point in line.points], what)
    return figure(name, f"{what}, by {over}", line_chart(x, y, present, f"{what} by {over}: {name}"))


def _cases(report: Report) -> Iterator[str]:
    for index, case in enumerate(report.cases):
        yield f'<h2 id="case{index}">{escape(str(case))}</h2>'
        outcomes = [
            (place, found) for place, arm in enumerate(report.arms) if (found := report.outcome(index, arm.name))
        ]
        if not outcomes:
            yield '<p class="bad">Every run broke off.</p>'
            continue
        yield f'<div class="cards">{_curves(report, outcomes)}{"".join(_ratios(report, index))}</div>'
        yield _table(outcomes)


def _curves(report: Report, outcomes: list[tuple[int, Outcome]]) -> str:
    most = max(outcome.samples for _, outcome in outcomes)
    series = [
        Series(
            outcome.arm,
            style_of(place),
            [(value, share) for value, share in outcome.cdf_us if share <= 1 - 1 / outcome.samples],
        )
        for place, outcome in outcomes
    ]
    x = log_axis([point[0] for line in series for point in line.points], "latency, µs")
    what = "messages" if report.plan.load.is_timed else "rounds"
    chart = line_chart(x, tail_axis(most, f"share of {what} done"), series, "cumulative distribution of latency")
    return figure("Latency", "further left is faster; the tail is stretched", chart)


def _ratios(report: Report, case: int) -> Iterator[str]:
    """The verdicts of one case, a plot for each measure."""
    baseline = report.arms[0].name
    measures: dict[Measure, list[Interval]] = {}
    for place, arm in enumerate(report.arms):
        for verdict in report.verdicts_on(case, arm.name):
            measures.setdefault(verdict.measure, []).append(_interval(verdict, style_of(place)))
    charts = [intervals(rows, f"{WORDS[measure]} over that of {baseline}") for measure, rows in measures.items()]
    if charts:
        yield figure(f"Against {baseline}", "an interval that touches 1 shows no difference", "".join(charts))


def _interval(verdict: Verdict, style: int) -> Interval:
    ratio = verdict.ratio
    return Interval(
        name=verdict.arm,
        style=style,
        value=ratio.value,
        low=ratio.low,
        high=ratio.high,
        text=str(ratio),
        tone=ratio.tone(more_is_better=verdict.measure == "throughput"),
    )


def _table(outcomes: list[tuple[int, Outcome]]) -> str:
    heading = ["arm", "p50 µs", "p90", "p99", "p99.9", "max", "messages/s", "MB/s", "CPU s / 1,000 rounds"]
    heading += ["memory MiB", "of it grown", "lost"]
    rows = []
    for place, outcome in outcomes:
        latency = outcome.latency_us
        rows.append(
            [
                key(style_of(place)) + escape(outcome.arm),
                *map(cell, (latency.p50, latency.p90, latency.p99, latency.p999, latency.max)),
                cell(outcome.messages_per_second or None),
                cell(outcome.megabytes_per_second or None),
                f"{outcome.cpu_seconds_per_1000_rounds:.3f}",
                f"{outcome.peak_memory_mib:.0f}",
                f"{outcome.grown_memory_mib:.1f}",
                str(outcome.lost) if outcome.agreed else f'<span class="bad">{outcome.lost}, ranks differ</span>',
            ]
        )
    return table(heading, rows)


def _idle(report: Report) -> Iterator[str]:
    if report.idle:
        styles = {arm.name: style_of(place) for place, arm in enumerate(report.arms)}
        yield "<h2>Idle</h2>"
        yield (
            f"<p>CPU time while {report.plan.ranks} ranks wait for messages, with a sign of life every "
            f"{report.plan.heartbeat:g} s, in percent of a core.</p>"
        )
        rows = [
            [key(styles[idle.arm]) + escape(idle.arm), *(f"{x:.2f} %" for x in idle.cpu_percent)]
            for idle in report.idle
        ]
        yield table(["arm", *(f"rank {rank}" for rank in range(report.plan.ranks))], rows)


def _repeat(report: Report) -> Iterator[str]:
    plan = msgspec.json.format(msgspec.json.encode(report.plan, enc_hook=plain), indent=2).decode()
    return repeat(report.argv, report.about, plan, report.order)


def _bytes(value: float) -> str:
    return size_text(int(value)).replace("iB", "")
