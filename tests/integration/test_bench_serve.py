"""``tpserve bench serve`` with real servers: short runs, whose figures nobody looks at."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import psutil
import pytest
from tests.processes import by_name

from tpserve.bench.serve.counters import Counts
from tpserve.bench.serve.results import read_report
from tpserve.frontend.text import TextCodec
from tpserve.testing.fake_server import FakeServer
from tpserve.testing.models import make_model

SHORT = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "6", "--random-vocab-size", "320"]
HANG = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)


@pytest.fixture
def server(model: Path) -> Iterator[FakeServer]:
    """A server that echoes prompts."""
    with FakeServer(TextCodec.from_folder(model)) as server:
        yield server.start()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A base of run directories that is ours alone, and short enough for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="tpb-") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield Path(name)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tpserve.cli.main", "bench", "serve", *arguments]


@pytest.fixture
def bench(tmp_path: Path, runtime: Path) -> Any:
    """Run the bench."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments), capture_output=True, text=True, timeout=HANG, cwd=tmp_path, check=False
        )

    return run


def test_a_server_that_runs_is_swept(bench: Any, server: FakeServer, tmp_path: Path) -> None:
    rates = ["--request-rate", "50,inf", "--burstiness", "0.5", "--max-concurrency", "3"]
    done = bench("--url", server.url, *SHORT, *rates, "--json", "out.json", "--html", "out.html")
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(tmp_path / "out.json")

    assert [outcome.rate for outcome in report.outcomes] == [50.0, None]
    for outcome in report.outcomes:
        assert (outcome.completed, outcome.failed) == (4, 0)
        assert outcome.server == outcome.client == Counts(32, 0, 24)
    prompts = [tuple(message.prompt_ids) for message in server.seen]  # type: ignore[union-attr]
    assert len(set(prompts)) == len(prompts)
    assert report.verdicts == []
    ElementTree.parse(tmp_path / "out.html")


def test_a_server_that_is_starting_is_waited_for(model: Path, tmp_path: Path) -> None:
    with FakeServer(TextCodec.from_folder(model)) as server:
        arguments = ["--url", server.url, *SHORT, "--json", "out.json"]
        with subprocess.Popen(
            command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        ) as process:
            assert process.stderr is not None
            assert process.stderr.readline().startswith(f"waiting for {server.url[7:]}, 600 s at most: ")
            server.start()
            assert (process.wait(HANG), process.stderr.read()) == (0, "")

    [outcome] = read_report(tmp_path / "out.json").outcomes
    assert (outcome.completed, outcome.failed) == (4, 0)


def test_conversations_are_asked_as_chats(bench: Any, server: FakeServer, tmp_path: Path) -> None:
    talks = [
        {"conversations": [{"value": f"{number} what is it, please? "}, {"value": "x" * 24}]} for number in range(6)
    ]
    (tmp_path / "talks.json").write_bytes(msgspec.json.encode(talks))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", "talks.json", "--backend", "openai-chat"]
    done = bench("--url", server.url, "--num-prompts", "5", *flags, "--json", "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    [outcome] = read_report(tmp_path / "out.json").outcomes

    assert (outcome.completed, outcome.agrees) == (5, True)
    assert outcome.client.generation_tokens == 5 * 6


def test_requests_that_fail_are_named_and_without_any_answer_it_fails(bench: Any, server: FakeServer) -> None:
    done = bench("--url", server.url, *SHORT, "--random-vocab-size", "100000")

    assert done.returncode == 1
    assert "requests failed: 400:" in done.stdout


def test_two_servers_take_turns(bench: Any, model: Path, tmp_path: Path, runtime: Path) -> None:
    flags = f"{model} --threads 1 --kv-tokens 1024"
    done = bench("--a", flags, "--b", f"{flags} --detokenizers 2", "--blocks", "1", *SHORT, "--json", "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(tmp_path / "out.json")

    assert [outcome.arm for outcome in report.outcomes] == ["A", "B"]
    for outcome in report.outcomes:
        assert outcome.server == outcome.client == Counts(32, 0, 24)
    assert [arm.composition["config"]["detokenizers"] for arm in report.plan.arms] == [1, 2]
    assert "one block cannot tell" in done.stdout
    assert run_dirs(runtime) == []


def test_a_server_that_does_not_start_is_told_in_one_line(bench: Any, model: Path) -> None:
    done = bench("--a", f"{model} --host 127.0.0.256", *SHORT)

    assert done.returncode == 2
    assert done.stderr.startswith("error: A: the server did not start: --host 127.0.0.256 is no address")
    assert "Traceback" not in done.stderr


def is_starting(bench: psutil.Process) -> bool:
    return "rank0" in by_name(bench.children(recursive=True))


def is_under_load(bench: psutil.Process) -> bool:
    return any(connection.status == psutil.CONN_ESTABLISHED for connection in bench.net_connections())


@pytest.mark.parametrize(
    ("signum", "moment"),
    [
        (signal.SIGINT, is_under_load),
        (signal.SIGTERM, is_starting),
        (signal.SIGKILL, is_under_load),
    ],
)
def test_an_interruption_leaves_nothing(
    model: Path, runtime: Path, signum: signal.Signals, moment: Callable[[psutil.Process], bool]
) -> None:
    endless = ["--num-prompts", "10000", "--max-concurrency", "2", *SHORT[2:]]
    flags = f"{model} --threads 1 --kv-tokens 1024"
    with subprocess.Popen(command("--a", flags, *endless), stderr=subprocess.PIPE) as process:
        try:
            bench = psutil.Process(process.pid)
            deadline = time.monotonic() + HANG
            while not moment(bench):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            servers = bench.children(recursive=True)
            process.send_signal(signum)
            said = process.communicate(timeout=HANG)[1]
        finally:
            process.kill()

    if signum != signal.SIGKILL:
        assert (process.returncode, said) == (128 + signum, b"interrupted: there are no figures\n")
    assert psutil.wait_procs(servers, timeout=HANG)[1] == []
    assert run_dirs(runtime) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_after_whole_blocks_tells_what_they_brought(
    server: FakeServer, tmp_path: Path, signum: signal.Signals
) -> None:
    arguments = ["--url", server.url, "--blocks", "100000", *SHORT, "--num-warmups", "0", "--json", "out.json"]
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            server.wait(lambda: len(server.seen) > 17)
            process.send_signal(signum)
            told, said = process.communicate(timeout=HANG)
        finally:
            process.kill()
    report = read_report(tmp_path / "out.json")

    assert (process.returncode, said) == (128 + signum, b"")
    assert report.cut_short is not None
    assert (report.cut_short.signal, report.cut_short.blocks) == (signum, report.blocks)
    assert report.blocks >= 3
    assert report.outcomes[0].completed == 4 * report.blocks
    assert f"cut short by {signum.name}; whole blocks: {report.blocks} of 100000" in told.decode()


def run_dirs(runtime: Path) -> list[str]:
    base = runtime / "tpserve"
    return [path.name for path in base.iterdir() if path.is_dir()] if base.exists() else []
