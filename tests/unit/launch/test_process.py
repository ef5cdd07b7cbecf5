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
from threading import Thread
from typing import Any

import msgspec
import psutil
import pytest

from tpserve.frontend.control import DownEvent
from tpserve.launch.process import Child, Exited, Said, Signalled, Start, Watch
from tpserve.launch.protocol import ChildSpec, Failed, Ready, Stuck

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

def fail_consequence(line, payload):
    try:
        raise DeadlineExceeded("nobody came")
    except DeadlineExceeded as error:
        raise RankError(1, 2, "a peer", "nobody") from error

def fail_user(line, payload):
    raise ModelError("wrong", "mend it")

def cores(line, payload):
    line.report(Stuck(0, str(sorted(os.sched_getaffinity(0)))))
"""


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.close()


@pytest.fixture
def make(tmp_path: Path) -> Any:
    (tmp_path / "roles_of_test_process.py").write_text(ROLES)

    def start(role: str, payload: Any = None, descriptors: tuple[int, ...] = (), **spec: Any) -> Start:
        raw = msgspec.Raw(msgspec.json.encode(payload))
        made = ChildSpec(name=role, place=role, main=f"roles_of_test_process:{role}", payload=raw, **spec)
        return Start(made, {"PYTHONPATH": str(tmp_path), "COLOUR": "blue"}, descriptors)

    return start


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
    assert psutil.Process(child.pid).cmdline()[0] == "tpserve: echo"
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
def test_no_child_outlives_a_starter_that_is_killed(make: Any, tmp_path: Path, thread: bool) -> None:
    (tmp_path / "start").write_bytes(msgspec.json.encode(make("wait")))
    script = f"""
import math, os, signal, threading
from pathlib import Path
import msgspec
from tpserve.launch.process import Start, Watch
watch = Watch()
start = msgspec.json.decode(Path({str(tmp_path / "start")!r}).read_bytes(), type=Start)
thread = threading.Thread(target=watch.start, args=(start,))
thread.start() if {thread} else watch.start(start)
if {thread}: thread.join()
watch.next(math.inf)
print(watch.children[0].pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        child = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
    child.wait(HANG)


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
