"""From made-up samples to figures and verdicts."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.bench.serve.made_up import REQUESTS, make_plan, make_runs

from tpserve.bench.serve.counters import Counts
from tpserve.bench.serve.load import Sample
from tpserve.bench.serve.measure import Measurement
from tpserve.bench.serve.results import Measure, Report
from tpserve.bench.serve.summary import seconds, summarise, times

ONE = Sample(due=1.0, sent=1.5, arrivals=[2.0, 2.1, 2.4], prompt_tokens=7, output_tokens=5)
SHORT = Sample(due=0.0, sent=0.0, arrivals=[3.0], output_tokens=1)
FAILED = Sample(due=0.0, error="503: no")


@pytest.fixture(scope="module")
def report() -> Report:
    plan = make_plan()
    return summarise(plan, Measurement(make_runs(plan)), ["tpserve"])


@pytest.mark.parametrize(
    ("measure", "milliseconds"),
    [("ttft", [1000, 3000]), ("tpot", [100]), ("itl", [100, 300]), ("e2el", [1400, 3000])],
)
def test_latencies_count_from_when_a_request_was_due(measure: Measure, milliseconds: list[float]) -> None:
    assert times([ONE, FAILED, SHORT], measure) == pytest.approx(milliseconds)


def test_a_run_lasts_until_the_last_text() -> None:
    assert seconds([ONE, SHORT, FAILED]) == 3.0
    assert seconds([FAILED]) == 0.0


def test_figures_are_over_all_blocks(report: Report) -> None:
    a, b = report.outcomes_at(None)
    ttft, itl = a.latency_ms["ttft"], a.latency_ms["itl"]

    assert (a.arm, a.completed, a.failed, b.arm) == ("A", 5 * REQUESTS, 0, "B")
    assert ttft.figures["mean"] == pytest.approx(100, rel=0.02)
    assert ttft.figures["p90"] == pytest.approx(108, rel=0.02)
    assert (ttft.samples, itl.samples) == (5 * REQUESTS, 5 * REQUESTS * 4)
    assert itl.figures == {"mean": 10, "p50": 10, "p90": 10, "p99": 10}
    assert a.output_throughput == pytest.approx(5 * REQUESTS / (0.59 + 0.14), rel=0.03)
    assert a.total_throughput == pytest.approx(3 * a.output_throughput, rel=0.001)
    assert a.request_throughput == pytest.approx(a.output_throughput / 5, rel=0.001)
    assert a.late_ms == pytest.approx(1)


def test_a_quantile_of_too_few_samples_is_not_told() -> None:
    plan = make_plan(blocks=1)
    a, _ = summarise(plan, Measurement(make_runs(plan)), []).outcomes_at(None)

    assert a.latency_ms["ttft"].figures["p99"] is None
    assert a.latency_ms["itl"].figures["p99"] is not None


def test_the_second_arm_is_held_against_the_first(report: Report) -> None:
    for measure in ("ttft", "itl", "tpot", "e2el"):
        for figure in ("mean", "p50", "p90"):
            verdict = report.verdict(None, measure, figure)
            assert verdict is not None
            assert verdict.ratio.value == pytest.approx(2, rel=0.03)
            assert verdict.ratio.low <= 2.05
            assert (verdict.verdict, verdict.tone) == ("more", "bad")
    throughput = report.verdict(None, "output_throughput", "mean")
    assert throughput is not None
    assert (throughput.verdict, throughput.tone) == ("less", "bad")
    a, b = report.outcomes_at(None)
    assert throughput.ratio.value == pytest.approx(b.output_throughput / a.output_throughput, rel=1e-4)


def test_equal_arms_show_no_difference() -> None:
    plan = make_plan()
    report = summarise(plan, Measurement(make_runs(plan, slowness=(1.0, 1.0))), [])
    random = [verdict for verdict in report.verdicts if verdict.measure in ("ttft", "e2el", "output_throughput")]

    assert len(random) == 9
    assert {(verdict.verdict, verdict.tone) for verdict in random} == {("no difference", "quiet")}


def test_one_block_or_one_arm_gives_no_verdict() -> None:
    for plan in (make_plan(blocks=1), make_plan(arms=make_plan().arms[:1])):
        assert summarise(plan, Measurement(make_runs(plan)), []).verdicts == []


def test_a_block_in_which_an_arm_answered_nothing_is_left_out_of_verdicts() -> None:
    plan = make_plan()
    runs = make_runs(plan)
    runs[0] = msgspec.structs.replace(runs[0], samples=[FAILED] * REQUESTS)
    report = summarise(plan, Measurement(runs), [])
    a, _ = report.outcomes_at(None)

    assert (a.completed, a.failed, a.errors) == (4 * REQUESTS, REQUESTS, {"503: no": REQUESTS})
    assert report.is_sound
    assert {verdict.measure for verdict in report.verdicts} == {"output_throughput", "ttft", "tpot", "itl", "e2el"}


def test_an_arm_that_answered_nothing_at_all_is_not_sound() -> None:
    plan = make_plan()
    runs = [
        msgspec.structs.replace(run, samples=[FAILED] * REQUESTS, counted=Counts()) if run.arm else run
        for run in make_runs(plan)
    ]
    report = summarise(plan, Measurement(runs), [])
    _, b = report.outcomes_at(None)

    assert (report.is_sound, b.latency_ms, b.output_throughput, b.agrees) == (False, {}, 0, True)
    assert report.verdicts == []


def test_a_server_that_counts_otherwise_is_seen(report: Report) -> None:
    plan = make_plan()
    runs = make_runs(plan)
    runs[0] = msgspec.structs.replace(runs[0], counted=Counts(10 * REQUESTS, 0, 5 * REQUESTS + 1))
    runs[1] = msgspec.structs.replace(runs[1], counted=None)
    a, b = summarise(plan, Measurement(runs), []).outcomes_at(None)

    assert all(outcome.agrees for outcome in report.outcomes)
    assert (a.agrees, a.server) == (False, Counts(50 * REQUESTS, 0, 25 * REQUESTS + 1))
    assert (b.agrees, b.server) == (True, None)
