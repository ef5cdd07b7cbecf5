"""From made-up records to figures, verdicts, JSON, a table and a page."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from rich.console import Console
from tests.unit.bench.transport.made_up import GAP, make_measurement, make_plan

from tpserve.bench.blocks import CutShort
from tpserve.bench.transport.cases import Case, Load
from tpserve.bench.transport.measure import Failure, Measurement, Plan, order
from tpserve.bench.transport.records import CaseRecord, pack
from tpserve.bench.transport.report_html import page
from tpserve.bench.transport.report_terminal import print_report
from tpserve.bench.transport.results import Report, read_report
from tpserve.bench.transport.summary import summarise

ARGV = ["tpserve", "bench", "transport", "--a", "<slow> & sure"]


@pytest.fixture(scope="module")
def report() -> Report:
    plan = make_plan()
    return summarise(plan, make_measurement(plan), ARGV)


def test_a_round_ends_with_the_last_rank(report: Report) -> None:
    slow, fast = report.outcome(1, "slow"), report.outcome(1, "fast")
    assert slow is not None
    assert fast is not None

    assert slow.latency_us.p50 == pytest.approx(200, rel=0.02)
    assert fast.latency_us.p50 == pytest.approx(50, rel=0.02)
    assert slow.latency_us.p99 == pytest.approx(200 * 1.262, rel=0.05)
    assert (slow.samples, slow.blocks, len(slow.block_p50_us)) == (2000, 5, 5)


def test_only_the_time_inside_paced_rounds_counts(report: Report) -> None:
    outcome = report.outcome(2, "fast")
    assert outcome is not None

    assert outcome.messages_per_second == pytest.approx(4 / 50e-6, rel=0.02)
    assert outcome.megabytes_per_second == pytest.approx(300 * 4 / 50, rel=0.02)
    assert outcome.cpu_seconds_per_1000_rounds == pytest.approx(2 * 0.05 / 400 * 1000)
    assert (outcome.peak_memory_mib, outcome.grown_memory_mib) == (41, 1)
    assert (outcome.lost, outcome.agreed) == (0, True)


def test_verdicts_are_against_the_first_arm(report: Report) -> None:
    [p50, p99] = report.verdicts_on(1, "fast")
    assert (p50.baseline, p50.measure, p99.measure) == ("slow", "p50", "p99")
    assert p50.ratio.low < 0.25 < p50.ratio.high
    assert (p50.verdict, p50.is_good) == ("less", True)
    assert [found.verdict for found in report.verdicts_on(1, "same")] == ["no difference"] * 2
    assert report.verdicts_on(1, "slow") == []


@pytest.mark.parametrize("pace", ["paced", "free"])
def test_one_block_says_nothing(pace: Literal["paced", "free"]) -> None:
    plan = msgspec.structs.replace(make_plan(Load(pace=pace)), blocks=1)
    report = summarise(plan, make_measurement(plan), ARGV)
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))

    assert report.verdicts == []
    assert "one block says nothing" in out.getvalue()
    assert "one block says nothing" in page(report)


@pytest.mark.parametrize("pace", ["paced", "free"])
def test_two_blocks_that_drift_tell_nothing(pace: Literal["paced", "free"]) -> None:
    """Blocks of one arm differ by a quarter: what is seen between two arms that differ by less is chance."""
    plan = msgspec.structs.replace(make_plan(Load(pace=pace)), blocks=2)
    measured = make_measurement(plan)
    alike = 4 if pace == "paced" else 1  # the fast arm's rounds then last as long as the slow one's
    for block in measured.blocks:
        drift = {(1, 0): 1.05, (1, 1): 1.25}.get((block.arm, block.number), 1.0)
        for rank in block.ranks:
            rank.cases[:] = [stretched(record, alike * drift if block.arm == 1 else drift) for record in rank.cases]
    report = summarise(plan, measured, ARGV)

    assert {found.verdict for found in report.verdicts_on(1, "fast")} == {"cannot tell"}
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    assert out.getvalue().count("cannot tell: more --repeats make intervals narrower") == 1
    assert "cannot tell: more --repeats" in page(report)
    assert not re.search(r"\de[-+]?\d", out.getvalue())


def stretched(record: CaseRecord, factor: float) -> CaseRecord:
    """The same rounds, each so many times as long, and the pauses between them too."""
    ends = np.frombuffer(record.ends, dtype=np.int64)
    starts = np.frombuffer(record.starts, dtype=np.int64)
    begins = (np.arange(len(ends)) + 1) * GAP
    later = (begins * factor).astype(np.int64)
    return msgspec.structs.replace(
        record,
        ends=pack((later + ((ends - begins) * factor).astype(np.int64)).tolist()),
        starts=pack(later.tolist()) if len(starts) else b"",
        arrivals=pack(later.tolist()) if len(starts) else b"",
    )


def test_a_quantile_that_is_not_told_gets_no_verdict() -> None:
    plan = make_plan()
    plan = msgspec.structs.replace(plan, cases=[Case(1, 300, 30)])
    report = summarise(plan, make_measurement(plan), ARGV)
    outcome = report.outcome(0, "fast")
    assert outcome is not None

    assert outcome.latency_us.p99 is None
    assert [found.measure for found in report.verdicts_on(0, "fast")] == ["p50"]


def test_idle_is_a_share_of_a_core(report: Report) -> None:
    assert [(idle.arm, idle.cpu_percent) for idle in report.idle] == [
        (name, [pytest.approx(0.1), pytest.approx(0.2)]) for name in ("slow", "fast", "same")
    ]


def test_free_running_is_judged_by_what_goes_through() -> None:
    plan = make_plan(Load(pace="free"))
    report = summarise(plan, make_measurement(plan), ARGV)
    outcome = report.outcome(1, "fast")
    assert outcome is not None

    assert outcome.messages_per_second == pytest.approx(1000, rel=0.01)
    assert [found.measure for found in report.verdicts_on(1, "fast")] == ["throughput"]
    assert report.verdicts_on(0, "fast")[0].ratio.value == pytest.approx(1, rel=0.01)


def test_messages_that_arrive_by_themselves_count_one_by_one() -> None:
    plan = make_plan(Load(pace="burst"))
    plan = msgspec.structs.replace(plan, cases=plan.cases[1:])
    outcome = summarise(plan, make_measurement(plan), ARGV).outcome(1, "slow")
    assert outcome is not None

    assert outcome.samples == 5 * 400 * 4
    assert outcome.latency_us.p50 == pytest.approx(200, rel=0.02)


def test_losses_are_seen() -> None:
    plan = make_plan()
    measured = make_measurement(plan)
    record = measured.blocks[0].ranks[1].cases[1]
    measured.blocks[0].ranks[1].cases[1] = msgspec.structs.replace(
        record, counts=bytes(8) + record.counts[8:], digest=1
    )
    report = summarise(plan, measured, ARGV)
    outcome = report.outcome(1, plan.arms[measured.blocks[0].arm].name)
    assert outcome is not None

    assert (outcome.lost, outcome.agreed, report.is_sound) == (1, False, False)


def test_the_json_reads_back_and_says_how_to_repeat_it(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(report.encode())

    assert msgspec.json.encode(read_report(file)) == msgspec.json.encode(report)
    raw = msgspec.json.decode(file.read_bytes())
    assert (raw["bench"], raw["schema"], raw["argv"]) == ("transport", 1, ARGV)
    assert raw["plan"]["seed"] == 7
    assert raw["about"]["versions"]["tpserve"]
    assert raw["order"] == [[report.arms[arm].name for arm in arms] for arms in order(report.plan)]


def test_a_trace_s_path_survives_the_json(tmp_path: Path) -> None:
    plan = make_plan(Load(trace=Path("/some/trace")))
    report = summarise(plan, make_measurement(plan), ARGV)
    (tmp_path / "report.json").write_bytes(report.encode())

    assert read_report(tmp_path / "report.json").plan.load.trace == Path("/some/trace")


@pytest.mark.parametrize("pace", ["paced", "free"])
def test_the_page_is_well_formed_and_needs_nothing_else(pace: str) -> None:
    plan = make_plan(Load(pace="free") if pace == "free" else Load())
    text = page(summarise(plan, make_measurement(plan), ARGV))
    tree = ElementTree.fromstring(text)
    space = "{http://www.w3.org/1999/xhtml}"

    assert len(list(tree.iter(f"{space}figure"))) == 2 * len(plan.cases) + 1
    assert "&lt;slow&gt; &amp; sure" in text
    assert not [node for node in tree.iter() if {"src", "href"} & set(node.keys()) and node.get("href", "")[:1] != "#"]
    assert "nan" not in "".join(str(node.attrib) for node in tree.iter())


def test_the_terminal_shows_every_arm_and_verdict_in_80_columns(report: Report) -> None:
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    text = out.getvalue()

    assert "no difference (" in text
    assert "--repeats" not in text
    assert re.search(r"fast +0\.2[45]\d?× \(0\.2", text)
    assert "…" not in text.replace(" … ", "")
    assert "idle, CPU in percent of a core" in text


def test_runs_that_broke_off_are_told() -> None:
    plan = make_plan()
    measured = make_measurement(plan)
    kept = [block for block in measured.blocks if block.arm != 1]
    report = summarise(plan, Measurement(kept, [Failure(0, "fast", "rank1 failed: <no> luck")]), ARGV)
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))

    assert "rank1 failed" in out.getvalue()
    assert not report.is_sound
    assert report.outcome(0, "fast") is None
    assert report.verdicts_on(0, "same")
    ElementTree.fromstring(page(report))


def test_what_was_cut_short_says_so(tmp_path: Path) -> None:
    plan = make_plan()
    kept = [block for block in make_measurement(plan).blocks if block.number < 3]
    report = summarise(plan, Measurement(kept, [], CutShort(3, signal.SIGTERM)), ARGV)
    (tmp_path / "report.json").write_bytes(report.encode())
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))

    assert read_report(tmp_path / "report.json").cut_short == CutShort(3, signal.SIGTERM)
    assert len(report.order) == 3
    assert "2 ranks, 3 blocks" in out.getvalue()
    assert out.getvalue().count("cut short by SIGTERM; whole blocks: 3 of 5") == 1
    assert "cut short by SIGTERM; whole blocks: 3 of 5" in page(report)
    ElementTree.fromstring(page(report))


def test_nothing_at_all_is_told_too() -> None:
    plan = make_plan()
    report = summarise(plan, Measurement([], [Failure(0, "slow", "no luck")]), ARGV)

    assert "Every run broke off" in page(report)


def test_the_order_is_random_and_a_function_of_the_seed() -> None:
    def orders(seed: int) -> list[list[int]]:
        return order(Plan(arms=make_plan().arms, cases=[], load=Load(), blocks=30, seed=seed))

    assert orders(1) == orders(1) != orders(2)
    assert all(sorted(block) == [0, 1, 2] for block in orders(1))
    assert len({tuple(block) for block in orders(1)}) == 6
