"""A comparison's outcome as a page: latency curves, ratios with intervals, sweeps, and how to repeat it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from html import escape

import msgspec

from tpserve.bench.charts import Interval, Series, intervals, line_chart, log_axis, number, tail_axis
from tpserve.bench.page import cell, details, document, figure, legend, repeat, table
from tpserve.bench.serve.arrivals import Rate, say_rate
from tpserve.bench.serve.report_terminal import UNSURE, conditions, figures, notes
from tpserve.bench.serve.results import Measure, Outcome, Report, label

__all__ = ["page"]

CURVES: dict[Measure, str] = {"ttft": "Time to first token", "itl": "Inter-token latency", "e2el": "Whole request"}
ALL_AT_ONCE = 2.0
"""Where a sweep shows it: times the highest rate."""


def page(report: Report) -> str:
    """The whole page; it needs nothing but itself."""
    title = "Servers: " + " · ".join(arm.name for arm in report.plan.arms)
    rates = (part for index, rate in enumerate(report.plan.rates) for part in _rate(report, index, rate))
    return document(title, [*_head(report), *_sweep(report), *rates, *_repeat(report)])


def _head(report: Report) -> Iterator[str]:
    yield "<h1>Whole servers under load</h1>"
    yield f'<p class="quiet">{escape(conditions(report))}; {escape(report.about.date)}</p>'
    if report.cut_short:
        yield f'<p class="bad">{escape(report.cut_short.say(report.plan.blocks))}.</p>'
    if len(report.plan.arms) > 1:
        yield (
            "<p>Arms took turns in random order, each time on a fresh server; intervals are 95 % bootstrap intervals "
            "over blocks.</p>"
        )
    if report.is_unsure:
        yield f"<p>{escape(UNSURE)}.</p>"
    links = "".join(
        f'<a href="#rate{index}">{escape(say_rate(rate))}</a>' for index, rate in enumerate(report.plan.rates)
    )
    yield f"<nav>{links}</nav>"
    yield legend(f"{arm.name}: {arm}" for arm in report.plan.arms)


def _sweep(report: Report) -> Iterator[str]:
    """Throughput and latency over the rate, if there were several."""
    if len(report.plan.rates) > 1:
        yield "<h2>Over the rate</h2>"
        charts = [
            _over_rate(report, "Throughput", "output tokens/s", lambda outcome: outcome.output_throughput),
            *(
                _over_rate(report, name, "median, ms", partial(_median, measure=measure))
                for measure, name in CURVES.items()
            ),
        ]
        yield f'<div class="cards">{"".join(charts)}</div>'


def _over_rate(report: Report, name: str, what: str, value: Callable[[Outcome], float | None]) -> str:
    finite = [rate for rate in report.plan.rates if rate is not None]
    highest = ALL_AT_ONCE * max(finite, default=1.0)
    places = {rate: highest if rate is None else rate for rate in report.plan.rates}
    series = []
    for style, arm in enumerate(report.plan.arms):
        outcomes = [outcome for outcome in report.outcomes if outcome.arm == arm.name]
        points = [(places[outcome.rate], found) for outcome in outcomes if (found := value(outcome))]
        if points:
            series.append(Series(arm.name, style, sorted(points), has_markers=True))

    def label(place: float) -> str:
        return "inf" if None in places and place == highest else number(place)

    x = log_axis(places.values(), "requests/s that arrive", label, places.values())
    y = log_axis([point[1] for line in series for point in line.points], what)
    return figure(name, f"{what}, by rate", line_chart(x, y, series, f"{name} by rate"))


def _median(outcome: Outcome, measure: Measure) -> float | None:
    latency = outcome.latency_ms.get(measure)
    return latency.figures.get("p50", latency.figures["mean"]) if latency else None


def _rate(report: Report, index: int, rate: Rate) -> Iterator[str]:
    outcomes = report.outcomes_at(rate)
    yield f'<h2 id="rate{index}">Arriving {escape(say_rate(rate))}</h2>'
    cards = [_curves(outcomes, measure, name) for measure, name in CURVES.items()]
    yield f'<div class="cards">{"".join(cards)}{"".join(_ratios(report, rate))}</div>'
    yield _table(report, rate, outcomes)
    for is_bad, text in notes(outcomes):
        yield f'<p class="{"bad" if is_bad else "quiet"}">{escape(text)}</p>'


def _curves(outcomes: list[Outcome], measure: Measure, name: str) -> str:
    """One distribution of all arms; nothing if none has samples."""
    found = [(style, o.arm, o.latency_ms[measure]) for style, o in enumerate(outcomes) if measure in o.latency_ms]
    series = []
    for style, arm, latency in found:
        points = [(value, share) for value, share in latency.cdf if value > 0 and share <= 1 - 1 / latency.samples]
        if points:
            series.append(Series(arm, style, points))
    if not series:
        return ""
    x = log_axis([value for line in series for value, _ in line.points], "ms")
    y = tail_axis(max(latency.samples for _, _, latency in found), "share of samples")
    return figure(name, "further left is faster; the tail is stretched", line_chart(x, y, series, name))


def _ratios(report: Report, rate: Rate) -> Iterator[str]:
    """All verdicts at one rate."""
    verdicts = [verdict for verdict in report.verdicts if verdict.rate == rate]
    if verdicts:
        first, second = (arm.name for arm in report.plan.arms)
        rows = [
            Interval(
                name=label(verdict.measure, verdict.figure),
                style=1,
                value=verdict.ratio.value,
                low=verdict.ratio.low,
                high=verdict.ratio.high,
                text=str(verdict.ratio),
                tone=verdict.tone,
            )
            for verdict in verdicts
        ]
        chart = intervals(rows, f"{second} over {first}")
        yield figure(f"{second} against {first}", "an interval that touches 1 shows no difference", chart)


def _table(report: Report, rate: Rate, outcomes: list[Outcome]) -> str:
    """A row for each figure, as in the terminal."""
    compared = f"{outcomes[1].arm} over {outcomes[0].arm}" if report.verdicts else ""
    heading = ["ms, if not said", *(outcome.arm for outcome in outcomes), compared]
    amounts: list[tuple[str, Callable[[Outcome], float]]] = [
        ("answered", lambda outcome: outcome.completed),
        ("failed", lambda outcome: outcome.failed),
        ("requests/s", lambda outcome: outcome.request_throughput),
        ("all tokens/s", lambda outcome: outcome.total_throughput),
    ]
    rows = [[name, *(cell(value(outcome)) for outcome in outcomes), ""] for name, value in amounts]
    values = [{(measure, name): value for measure, name, value in figures(outcome)} for outcome in outcomes]
    for measure, name in dict.fromkeys(key for found in values for key in found):
        verdict = report.verdict(rate, measure, name)
        said = f'<span class="{verdict.tone}">{verdict.ratio}</span>' if verdict else ""
        rows.append([label(measure, name), *(cell(found.get((measure, name))) for found in values), said])
    return table(heading, rows)


def _repeat(report: Report) -> Iterator[str]:
    plan = msgspec.json.format(msgspec.json.encode(report.plan), indent=2).decode()
    yield from repeat(report.argv, report.about, plan, report.order)
    for arm in report.plan.arms:
        if arm.composition:
            made = msgspec.json.format(msgspec.json.encode(arm.composition), indent=2).decode()
            yield details(f"What {arm.name} is made of", made)
