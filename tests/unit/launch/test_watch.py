"""One child and its starter, without a supervisor."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import msgspec
import psutil
import pytest
from tests.processes import by_name, title

from tpserve.frontend.control import DownEvent
from tpserve.launch.forkserver import SINGLE
from tpserve.launch.process import Child, Start
from tpserve.launch.protocol import ChildSpec, Failed, Ready, Stuck
from tpserve.launch.watch import Exited, Said, Signalled, Watch

HANG = 60.0
ROLES = """
import os, signal, sys, time
from tpserve.errors import DeadlineExceeded, ModelError, RankError
from tpserve.launch.protocol import Ready, Stuck

def echo(line, payload):
    line.report(Ready())
    while True:
        line.report(Stuck(0, line.receive().reason))

def wait(line, payload):
    line.report(Ready())
    time.sleep(3600)

def deaf(line, payload):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait(line, payload)

def speak(line, payload):
    print("spoken", bytes(payload).decode(), os.environ["COLOUR"])

def inherit(line, payload):
    os.write(int(bytes(payload)), b"inherited")

def fail_long(line, payload):
    raise ValueError("x" * 300_000)

def fail_oddly(line, payload):
    raise ValueError("no \\udcff")

def fail_consequence(line, payload):
    try:
        raise DeadlineExceeded("nobody came")
    except DeadlineExceeded as error:
        raise RankError(1, 2, "a peer", "nobody") from error

def fail_user(line, payload):
    raise ModelError("wrong", "mend it")

def variables(line, payload):
    long = sum(len(text) for name, text in os.environ.items() if name.startswith("LONG"))
    line.report(Stuck(0, f"{long} {os.environb[b'ODD']} {'GONE' in os.environ} {'OPENBLAS_NUM_THREADS' in os.environ}"))

def cores(line, payload):
    line.report(Stuck(0, str(sorted(os.sched_getaffinity(0)))))
"""


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch(modules=["json"])
    yield watch
    watch.close()


@pytest.fixture(params=[False, True], ids=["alone", "forked"])
def is_forked(request: pytest.FixtureRequest) -> bool:
    """Whether children come from a fork server."""
    return bool(request.param)


@pytest.fixture
def make(tmp_path: Path, is_forked: bool) -> Any:
    (tmp_path / "roles_of_test_watch.py").write_text(ROLES)

    def start(role: str, payload: Any = None, descriptors: tuple[int, ...] = (), **spec: Any) -> Start:
        raw = msgspec.Raw(msgspec.json.encode(payload))
        made = ChildSpec(name=role, place=role, main=f"roles_of_test_watch:{role}", payload=raw, **spec)
        return Start(made, {"PYTHONPATH": path(tmp_path), "COLOUR": "blue"}, descriptors, is_forked)

    return start


def path(folder: Path) -> str:
    """Where modules are found, with a folder of ours."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def statuses(watch: Watch) -> list[Any]:
    """What is said until the last child has ended."""
    said = []
    while watch.children:
        happening = watch.next(time.monotonic() + HANG)
        assert happening is not None
        if isinstance(happening, Said):
            said.append(happening.status)
    return said


def test_events_go_down_and_statuses_come_up(watch: Watch, make: Any) -> None:
    child = watch.start(make("echo"))
    assert watch.next(time.monotonic() + HANG) == Said(child, Ready())
    for word in ("one", "two\nlines", "…"):
        child.send(DownEvent(word))
        assert watch.next(time.monotonic() + HANG) == Said(child, Stuck(0, word))
    assert "echo" in by_name(psutil.Process().children(recursive=True))
    child.signal(signal.SIGTERM)
    assert watch.next(time.monotonic() + HANG) == Exited(child)
    assert child.describe_exit() == "signal SIGTERM"
    child.send(DownEvent("to nobody"))
    child.signal(signal.SIGKILL)


def test_what_a_child_prints_does_not_mix_with_its_starters_results(
    watch: Watch, make: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    watch.start(make("speak", {"a": 1}))
    assert statuses(watch) == []
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", 'spoken {"a":1} blue\n')


def test_descriptors_are_inherited(watch: Watch, make: Any) -> None:
    reader, writer = os.pipe()
    watch.start(make("inherit", writer, (writer,)))
    os.close(writer)
    statuses(watch)
    assert os.read(reader, 100) == b"inherited"
    os.close(reader)


def test_a_traceback_of_any_length_arrives_whole(watch: Watch, make: Any) -> None:
    child = watch.start(make("fail_long"))
    (failed,) = statuses(watch)
    assert isinstance(failed, Failed)
    assert failed.error == "ValueError: " + "x" * 300_000
    assert failed.traceback.startswith("Traceback")
    assert (child.failure, child.exit_code) == (failed, 1)


def test_an_error_that_is_no_text_arrives_escaped(watch: Watch, make: Any) -> None:
    watch.start(make("fail_oddly"))
    (failed,) = statuses(watch)
    assert isinstance(failed, Failed)
    assert failed.error == r"ValueError: no \udcff"


def test_failures_say_whose_they_are(watch: Watch, make: Any) -> None:
    watch.start(make("fail_consequence"))
    (failed,) = statuses(watch)
    assert failed.is_consequence
    assert failed.error == "RankError: rank 1, round 2: expected a peer, found nobody"
    assert failed.traceback == ""
    watch.start(make("fail_user"))
    assert statuses(watch) == [Failed("wrong", "", "mend it", is_user_error=True)]


def test_a_child_is_held_to_its_cores(watch: Watch, make: Any) -> None:
    core = max(os.sched_getaffinity(0))
    watch.start(make("cores", cpus=[core]))
    assert statuses(watch) == [Stuck(0, f"[{core}]")]


def test_a_child_survives_the_thread_that_started_it(watch: Watch, make: Any) -> None:
    children: list[Child] = []
    thread = Thread(target=lambda: children.append(watch.start(make("echo"))))
    thread.start()
    thread.join()
    (child,) = children
    assert watch.next(time.monotonic() + HANG) == Said(child, Ready())
    child.send(DownEvent("still there?"))
    assert watch.next(time.monotonic() + HANG) == Said(child, Stuck(0, "still there?"))


@pytest.mark.parametrize("thread", [True, False])
def test_no_child_outlives_a_starter_that_is_killed(make: Any, tmp_path: Path, is_forked: bool, thread: bool) -> None:
    (tmp_path / "start").write_bytes(msgspec.json.encode(make("wait")))
    script = f"""
import math, os, signal, threading
from pathlib import Path
import msgspec
from tpserve.launch.process import Start
from tpserve.launch.watch import Watch
watch = Watch(modules=())
start = msgspec.json.decode(Path({str(tmp_path / "start")!r}).read_bytes(), type=Start)
thread = threading.Thread(target=watch.start, args=(start,))
thread.start() if {thread} else watch.start(start)
if {thread}: thread.join()
watch.next(math.inf)
print("started", flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "started\n"
        children = psutil.Process(starter.pid).children(recursive=True)
        starter.kill()
    assert len(children) == 1 + is_forked
    assert psutil.wait_procs(children, HANG)[1] == []


def test_a_wait_ends_at_its_deadline(watch: Watch, make: Any) -> None:
    watch.start(make("wait"))
    assert isinstance(watch.next(math.inf), Said)
    assert watch.next(time.monotonic() + 0.01) is None


def test_children_that_ignore_a_request_to_end_are_killed(watch: Watch, make: Any) -> None:
    child = watch.start(make("deaf"))
    assert watch.next(time.monotonic() + HANG) == Said(child, Ready())
    watch.end([child], grace=0.05)
    assert child.describe_exit() == "signal SIGKILL"
    assert watch.children == []


def test_signals_are_happenings_and_survive_the_end_of_children(watch: Watch, make: Any) -> None:
    child = watch.start(make("deaf"))
    assert watch.next(time.monotonic() + HANG) == Said(child, Ready())
    with watch.signals(signal.SIGUSR1):
        os.kill(os.getpid(), signal.SIGUSR1)
        watch.end([child], grace=HANG)
        assert child.describe_exit() == "signal SIGKILL"
        assert watch.next(time.monotonic() + HANG) == Signalled(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_only_the_parents_sigterm_counts(watch: Watch, make: Any) -> None:
    """A service manager sends one to every process."""
    child = watch.start(make("echo"))
    await_ready(watch, [child])
    for process in psutil.Process().children(recursive=True):
        subprocess.run(["kill", "-TERM", str(process.pid)], check=True)
    child.send(DownEvent("still there"))
    assert watch.next(time.monotonic() + HANG) == Said(child, Stuck(0, "still there"))
    watch.end([child], grace=HANG)
    assert child.describe_exit() == "signal SIGTERM"


def test_a_strangers_sigterm_does_not_swallow_the_parents(watch: Watch, make: Any) -> None:
    """Of two that wait for a child at once, it gets the first."""
    child = watch.start(make("echo"))
    await_ready(watch, [child])
    process = by_name(psutil.Process().children(recursive=True))["echo"]
    process.suspend()
    subprocess.run(["kill", "-TERM", str(process.pid)], check=True)
    resume = Timer(0.1, process.resume)
    resume.start()
    watch.end([child], grace=HANG)
    resume.join()
    assert child.describe_exit() == "signal SIGTERM"


def test_nothing_of_those_that_were_ended_happens_later(watch: Watch, make: Any) -> None:
    """Neither what they said before nor their ends; what another says does."""
    doomed = [watch.start(make("echo")) for _ in range(3)]
    other = watch.start(make("echo"))
    await_ready(watch, [*doomed, other])
    for child in [*doomed, other]:
        child.send(DownEvent("last words"))
    watch.end(doomed, grace=0.0)
    assert watch.next(time.monotonic() + HANG) == Said(other, Stuck(0, "last words"))
    assert watch.next(time.monotonic() + 0.2) is None


# What a fork server adds.


@pytest.mark.parametrize("is_forked", [True], indirect=True)
def test_any_environment_reaches_a_child(watch: Watch, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a datagram holds, bytes that are no text, and what has changed since the server started."""
    for number in range(3):
        monkeypatch.setenv(f"LONG{number}", "x" * 100_000)
    monkeypatch.setenv("ODD", os.fsdecode(b"\xff"))
    monkeypatch.setenv("GONE", "1")
    first = watch.start(make("variables"))
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("ODD", os.fsdecode(b"\xfe"))
    second = watch.start(make("variables"))
    said = {}
    while len(said) < 2:
        happening = watch.next(time.monotonic() + HANG)
        if isinstance(happening, Said):
            said[happening.child] = happening.status
    assert said == {first: Stuck(0, "300000 b'\\xff' True False"), second: Stuck(0, "300000 b'\\xfe' False False")}


def await_ready(watch: Watch, children: list[Child]) -> None:
    waiting = list(children)
    while waiting:
        happening = watch.next(time.monotonic() + HANG)
        assert isinstance(happening, Said)
        waiting.remove(happening.child)


def server(children: int) -> psutil.Process:
    """The fork server, which has so many children."""
    (found,) = psutil.Process().children()
    assert title(found) == "tpserve: forkserver"
    assert len(found.children()) == children
    return found


@pytest.mark.parametrize("is_forked", [True], indirect=True)
def test_one_server_forks_all(watch: Watch, make: Any) -> None:
    children = [watch.start(make("echo")), watch.start(make("wait"))]
    await_ready(watch, children)
    first = server(children=2)
    watch.end(children, grace=HANG)
    assert [child.describe_exit() for child in children] == ["signal SIGTERM"] * 2
    child = watch.start(make("echo"))
    assert watch.next(time.monotonic() + HANG) == Said(child, Ready())
    assert server(children=1) == first


@pytest.mark.parametrize("is_forked", [True], indirect=True)
def test_children_end_with_their_server_and_the_next_gets_another(watch: Watch, make: Any) -> None:
    children = [watch.start(make("wait")), watch.start(make("deaf"))]
    await_ready(watch, children)
    processes = psutil.Process().children(recursive=True)
    server(children=2).kill()
    assert [watch.next(time.monotonic() + HANG) for _ in children] == [Exited(child) for child in children]
    assert [child.describe_exit() for child in children] == ["its fork server (signal SIGKILL)"] * 2
    assert psutil.wait_procs(processes, HANG)[1] == []
    child = watch.start(make("echo"))
    assert watch.next(time.monotonic() + HANG) == Said(child, Ready())


@pytest.mark.parametrize("is_forked", [True], indirect=True)
def test_a_child_that_is_still_to_be_forked_can_be_ended(make: Any, tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(3600)")
    watch = Watch(modules=["slow_to_import"])
    child = watch.start(make("wait"))
    watch.end([child], grace=HANG)
    assert child.describe_exit() == "its fork server (signal SIGKILL)"
    watch.close()


@pytest.mark.parametrize("is_forked", [True], indirect=True)
@pytest.mark.parametrize("is_killed", [True, False])
def test_children_of_a_stopped_server_can_be_ended(
    watch: Watch, make: Any, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    monkeypatch.setattr("tpserve.launch.watch.KILL_SECONDS", 0.3)
    child = watch.start(make("wait"))
    await_ready(watch, [child])
    stopped = server(children=1)
    (process,) = stopped.children()
    stopped.suspend()
    if is_killed:
        process.kill()
        assert watch.next(time.monotonic() + 0.01) is None  # a deadline is kept all the same
        assert watch.next(time.monotonic() + HANG) == Exited(child)
    else:
        watch.end([child], grace=0.0)
    how = "no report of how: its fork server stands still" if is_killed else "its fork server (signal SIGKILL)"
    assert (child.exit_code, child.describe_exit()) == (-signal.SIGKILL, how)
    assert psutil.wait_procs([process, stopped], HANG)[1] == []
    child = watch.start(make("wait"))
    await_ready(watch, [child])


def test_what_is_imported_before_the_fork_starts_no_thread() -> None:
    script = "import os; from tpserve.launch import forking as it; it._import(['torch', 'tpserve.launch.roles'])"
    code = f"{script}; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, **SINGLE, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
