"""The same figures as JSON, as tables and as a page."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console
from tests.unit.bench.serve.made_up import REQUESTS, make_plan, make_runs

from tpserve.bench.blocks import CutShort
from tpserve.bench.serve.counters import Counts
from tpserve.bench.serve.load import Sample
from tpserve.bench.serve.measure import Measurement
from tpserve.bench.serve.report_html import page
from tpserve.bench.serve.report_terminal import print_report
from tpserve.bench.serve.results import Report, read_report
from tpserve.bench.serve.summary import summarise
from tpserve.bench.statistics import Ratio

ARGV = ["tpserve", "bench", "serve", "--a", "<slow> & sure"]


@pytest.fixture(scope="module")
def sweep() -> Report:
    plan = make_plan(rates=(1.0, 4.0, None))
    return summarise(plan, Measurement(make_runs(plan)), ARGV)


@pytest.fixture(scope="module")
def troubled() -> Report:
    """One arm fails now and then and miscounts, the other fails always."""
    plan = make_plan()
    failed = Sample(due=0.0, error="503: <too> many")
    runs = []
    for run in make_runs(plan):
        samples = [failed] * REQUESTS if run.arm else [failed, *run.samples[1:]]
        runs.append(msgspec.structs.replace(run, samples=samples, counted=Counts(1, 1, 1)))
    return summarise(plan, Measurement(runs), ARGV)


def terminal(report: Report) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    return out.getvalue()


def test_the_json_reads_back_and_says_how_to_repeat_it(sweep: Report, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(sweep.encode())

    assert msgspec.json.encode(read_report(file)) == msgspec.json.encode(sweep)
    raw = msgspec.json.decode(file.read_bytes())
    assert (raw["bench"], raw["schema"], raw["argv"]) == ("serve", 1, ARGV)
    assert (raw["plan"]["seed"], raw["plan"]["rates"]) == (7, [1.0, 4.0, None])
    assert raw["plan"]["arms"][1]["flags"] == ["--sync", "shm"]
    assert raw["about"]["versions"]["tpserve"]
    assert len(raw["runs"]) == 5 * 2 * 3
    assert len(raw["runs"][0]["samples"][0]["arrivals"]) == 5


def test_the_terminal_shows_both_arms_and_the_verdicts_in_80_columns(sweep: Report) -> None:
    text = terminal(sweep)

    assert text.count("TTFT mean") == 3
    assert "arriving 4 requests/s" in text
    assert "arriving all at once" in text
    assert "A counted what the client did" in text
    [row, *_] = [line for line in text.splitlines() if "TTFT p50" in line]
    assert re.search(r"p50 +(99|10)\S* +(199|20)\S* +(1\.9|2)\S*× \(\d", row)
    assert "…" not in text.replace(" … ", "")


def test_trouble_is_told(troubled: Report) -> None:
    text = terminal(troubled)

    assert "A: 5 requests failed: 503: <too> many" in text
    assert f"B: {5 * REQUESTS} requests failed" in text
    assert "A counted 5 prompt tokens (5 cached) and 5 generated, and the client" in text


def test_what_cannot_be_told_is_said_with_what_would_help(sweep: Report) -> None:
    unsure = msgspec.structs.replace(sweep.verdicts[0], verdict="cannot tell", ratio=Ratio(1.0, 1e-9, 1e9))
    report = msgspec.structs.replace(sweep, verdicts=[unsure])

    assert terminal(report).count("more --blocks make") == 1
    assert "1e" not in terminal(report)
    assert "more --blocks make" in page(report)
    assert "more --blocks" not in terminal(sweep) + page(sweep)


def test_what_was_cut_short_says_so(tmp_path: Path) -> None:
    plan = make_plan(blocks=5)
    runs = [run for run in make_runs(plan) if run.block < 2]
    report = summarise(plan, Measurement(runs, CutShort(2, signal.SIGINT)), ARGV)
    (tmp_path / "report.json").write_bytes(report.encode())

    assert read_report(tmp_path / "report.json").cut_short == CutShort(2, signal.SIGINT)
    assert len(report.order) == 2
    text = terminal(report)
    assert "2 blocks, seed" in text
    assert text.count("cut short by SIGINT; whole blocks: 2 of 5") == 1
    assert "cut short by SIGINT; whole blocks: 2 of 5" in page(report)
    ElementTree.fromstring(page(report))


def test_one_block_says_that_it_gives_no_verdict() -> None:
    plan = make_plan(blocks=1)
    text = terminal(summarise(plan, Measurement(make_runs(plan)), ARGV))

    assert "no verdict: one block cannot tell" in text


@pytest.mark.parametrize(("name", "figures"), [("sweep", 4 + 3 * 4), ("troubled", 3)])
def test_the_page_is_well_formed_and_needs_nothing_else(
    name: str, figures: int, request: pytest.FixtureRequest
) -> None:
    text = page(request.getfixturevalue(name))
    tree = ElementTree.fromstring(text)
    space = "{http://www.w3.org/1999/xhtml}"

    assert len(list(tree.iter(f"{space}figure"))) == figures
    assert "&lt;slow&gt; &amp; sure" in text
    assert "&lt;gloo&gt; &amp; so on" in text
    assert not [node for node in tree.iter() if {"src", "href"} & set(node.keys()) and node.get("href", "")[:1] != "#"]
    assert "nan" not in "".join(str(node.attrib) for node in tree.iter())
