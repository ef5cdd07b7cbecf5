"""``tpserve bench transport`` with real processes: short runs, whose figures nobody looks at."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import psutil
import pytest

from tpserve.bench.transport.measure import order
from tpserve.bench.transport.results import Report, read_report

SHORT = ["--rounds", "30", "--repeats", "2", "--warm-up", "5", "--watchdog", "60"]
HANG = 300


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A base of run directories that is ours alone, and short enough for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="tpb-") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


@pytest.fixture
def bench(tmp_path: Path, runtime: Path) -> Any:
    """Run the bench."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tpserve.cli.main", "bench", "transport", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=tmp_path, check=False)

    return run


def run_dirs(runtime: Path) -> list[str]:
    return [path.name for path in (runtime / "tpserve").iterdir() if path.is_dir()] if any(runtime.iterdir()) else []


def test_zmq_against_nng(bench: Any, tmp_path: Path, runtime: Path) -> None:
    flags = ["--messages", "0,3", "--seed", "5", "--idle", "0.3", "--json", "out.json", "--html", "out.html"]
    done = bench("--a", "zmq", "--b", "nng", *SHORT, *flags)
    report = sound(done, tmp_path)

    assert [arm.name.partition("+")[0] for arm in report.arms] == ["zmq", "nng"]
    assert len(report.outcomes) == 4
    for outcome in report.outcomes:
        assert (outcome.blocks, outcome.samples) == (2, 60)
        assert 0 < outcome.latency_us.p50 <= outcome.latency_us.max
        assert outcome.cpu_seconds_per_1000_rounds > 0
        assert outcome.peak_memory_mib > 10
    assert {(found.case, found.measure) for found in report.verdicts} == {(0, "p50"), (1, "p50")}
    assert [len(idle.cpu_percent) for idle in report.idle] == [2, 2]
    assert report.failures == []
    assert "zmq" in done.stdout
    ElementTree.parse(tmp_path / "out.html")
    assert (runtime / "tpserve").is_dir()
    assert run_dirs(runtime) == []
    assert report.order == [[report.arms[arm].name for arm in arms] for arms in order(report.plan)]


@pytest.mark.parametrize(
    "flags",
    [
        ["--free-running", "--messages", "0,4"],
        ["--arrival", "poisson", "--rate", "2000", "--messages", "2"],
        ["--arrival", "burst", "--rate", "5000", "--messages", "8"],
        ["--arrival", "trace", "--trace", "trace.jsonl"],
        ["--step", "500", "--messages", "0"],
    ],
    ids=["free", "poisson", "burst", "trace", "steps"],
)
def test_every_pace(bench: Any, tmp_path: Path, flags: list[str]) -> None:
    lines = [msgspec.json.encode({"at": 0.002 * index, "size": 64 + 40 * index}) for index in range(40)]
    (tmp_path / "trace.jsonl").write_bytes(b"\n".join(lines))
    report = sound(bench("--a", "zmq", *SHORT, "--repeats", "1", *flags, "--idle", "0", "--json", "out.json"), tmp_path)

    assert len(report.outcomes) == len(report.cases)


def test_every_synchronisation_with_three_ranks(bench: Any, tmp_path: Path) -> None:
    arms = ["--a", "ancestor", "--matrix", "transport=zmq", "sync=gloo,inband,shm"]
    flags = ["--ranks", "3", "--gap", "100", "--size", "64,100K", "--repeats", "1", "--idle", "0"]
    report = sound(bench(*arms, *SHORT, *flags, "--json", "out.json"), tmp_path)

    assert len(report.outcomes) == 8


def sound(done: subprocess.CompletedProcess[str], tmp_path: Path) -> Report:
    """The report of a run in which nothing went wrong."""
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(tmp_path / "out.json")
    assert all(outcome.agreed and not outcome.lost for outcome in report.outcomes)
    return report


def test_a_run_that_breaks_off_is_told_and_the_others_count(bench: Any, site: Any, tmp_path: Path) -> None:
    source = """
        TPSERVE_API = 1
        from tpserve.api import SyncSpec, hookimpl
        @hookimpl
        def tpserve_syncs():
            return [SyncSpec(name="broken", summary="never meets", factory="broken_sync:BrokenSync")]
    """
    code = """
        from tpserve.sync.inband import InbandSync
        class BrokenSync(InbandSync):
            def receive(self, deadline):
                raise RuntimeError("this one never hears anything")
    """
    files = {"broken/__init__.py": "", "broken/plugin.py": source, "broken_sync.py": code}
    site.add("tpserve-sync-broken", {"sync.broken": "broken.plugin"}, files)
    done = bench("--a", "zmq", "--b", "zmq,sync=broken", *SHORT, "--idle", "0", "--json", "out.json")
    report = read_report(tmp_path / "out.json")

    assert done.returncode == 1
    assert "never hears anything" in done.stdout
    assert [failure.arm for failure in report.failures] == ["zmq+broken"] * 2, report.failures
    assert [outcome.blocks for outcome in report.outcomes] == [2]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_after_whole_blocks_tells_what_they_brought(
    runtime: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    command = [sys.executable, "-m", "tpserve.cli.main", "bench", "transport", "--a", "zmq", *SHORT[:2], *SHORT[4:]]
    command += ["--repeats", "1000", "--idle", "0", "--json", "out.json", "--html", "out.html"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            deadline = time.monotonic() + HANG
            while not list(runtime.glob("tpserve/*/g2")):  # of the second block
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signum)
            told, said = process.communicate(timeout=HANG)
        finally:
            process.kill()
    report = read_report(tmp_path / "out.json")

    assert (process.returncode, said) == (128 + signum, b"")
    assert report.cut_short is not None
    assert (report.cut_short.signal, report.cut_short.blocks) == (signum, report.blocks)
    assert [outcome.blocks for outcome in report.outcomes] == [report.blocks]
    assert f"cut short by {signum.name}; whole blocks: {report.blocks} of 1000" in told.decode()
    assert "cut short" in (tmp_path / "out.html").read_text()
    assert run_dirs(runtime) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_an_interruption_leaves_nothing(runtime: Path, signum: signal.Signals) -> None:
    command = [sys.executable, "-m", "tpserve.cli.main", "bench", "transport", "--a", "zmq", "--rounds", "10000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + HANG
            while len(ranks := psutil.Process(process.pid).children()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            [name] = run_dirs(runtime)
            process.send_signal(signum)
            said = process.communicate(timeout=HANG)[1]
        finally:
            process.kill()

    if signum == signal.SIGTERM:
        assert (process.returncode, said) == (128 + signum, b"interrupted: there are no figures\n")
        assert run_dirs(runtime) == []
    assert psutil.wait_procs(ranks, timeout=HANG)[1] == []
    assert list(Path("/dev/shm").glob(f"tpserve-{name}-*")) == []
