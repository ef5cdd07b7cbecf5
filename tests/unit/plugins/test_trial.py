"""Imports are tried in children, one for each module: what a native library or a stubborn loop does ends there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tpserve.plugins import loading, trial
from tpserve.plugins.discovery import Entry, discover
from tpserve.plugins.trial import Trial, try_imports

STUBBORN = """
import time
while True:
    try:
        time.sleep(1)
    except BaseException:
        pass
"""
GOOD = """
from tpserve.api import PolicySpec, hookimpl

@hookimpl
def tpserve_policies():
    return [PolicySpec(name="good", summary="good", factory="good:Good")]
"""

ASK = """
import signal, threading, time
from tpserve.plugins.registry import Registry

{before}
registry = Registry.discover()
entry = next(entry for entry in registry.entries() if entry.key == "policy.it")
print(registry.status(entry).reason, registry.stated_api(entry))
"""


def add(site: Any, **sources: str) -> list[Entry]:
    for name, source in sources.items():
        site.add(name, {f"policy.{name}": name}, {f"{name}/__init__.py": f"TPSERVE_API = 1\n{source}"})
    return [entry for entry in discover() if entry.distribution in sources]


def ask(site: Any, source: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Let a process of its own look at a plugin: tests have threads that forbid to fork."""
    site.add("it", {"policy.it": "it"}, {"it/__init__.py": f"TPSERVE_API = 1\n{source}"})
    command = [sys.executable, "-c", ASK.format(before=before)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import ctypes; ctypes.string_at(0)", "its import ended the process with signal SIGSEGV 1"),
        ("import posix; posix._exit(3)", "its import ended the process with exit code 3 1"),
        ("import os; os.killpg(0, 9)", "its import ended the process with signal SIGKILL 1"),
        ("print('chatter'); input()", "it: EOFError: EOF when reading a line 1"),
        ("raise RuntimeError('no\\nluck')", "it: RuntimeError: no luck 1"),
    ],
)
def test_whatever_an_import_does_is_a_status(site: Any, source: str, says: str) -> None:
    done = ask(site, source)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, says, "")


def test_nobody_need_be_told_how_children_end(site: Any) -> None:
    done = ask(site, "import posix; posix._exit(3)", before="signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "its import ended the process 1", "")


def test_beside_threads_nothing_is_forked(site: Any) -> None:
    source = "import os; raise RuntimeError(os.getppid())"
    done = ask(site, source, before="threading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
    assert done.stdout.strip() == f"it: RuntimeError: {os.getpid()} 1"


def test_one_thread_is_what_it_takes() -> None:
    code = """
import threading
from tpserve.plugins.trial import can_try

assert can_try()
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()
assert not can_try()
done.set()
thread.join()
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_those_that_hang_share_one_wait_and_are_named(
    site: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "IMPORT_SECONDS", 3.0)
    monkeypatch.setattr(trial, "SOON", 0.3)
    entries = add(site, good=GOOD, stuck=STUBBORN, stopped="import os; os.kill(os.getpid(), 19)")
    tried = try_imports(entries)

    assert {entry.name: found for entry, found in tried.items() if found.failure is None} == {"good": Trial(1)}
    for name in ("stuck", "stopped"):
        failure = next(found.failure for entry, found in tried.items() if entry.name == name)
        assert failure is not None
        assert failure.reason == "its import took longer than 3 s"
    assert caplog.messages == ["waiting for the import of policy.stopped, policy.stuck, 3 s at most"]


def test_the_entries_of_a_module_are_tried_together(site: Any, tmp_path: Path) -> None:
    note = tmp_path / "note"
    source = GOOD.replace('"good:Good")', '"good:Good"), 7') + f"open({str(note)!r}, 'a').write('x')\n"
    entry_points = dict.fromkeys(("policy.good", "policy.other", "sync.good"), "good")
    site.add("good", entry_points, {"good/__init__.py": f"TPSERVE_API = 1\n{source}"})
    tried = try_imports([entry for entry in discover() if entry.distribution == "good"])

    assert note.read_text() == "x"
    reasons = {entry.key: found.failure and found.failure.reason for entry, found in tried.items()}
    assert reasons == {
        "policy.good": "tpserve_policies of good must return PolicySpec, found int",
        "policy.other": "tpserve_policies of good must return PolicySpec, found int",
        "sync.good": "tpserve_syncs of good must return one spec named 'good', found: none",
    }


def test_what_an_import_has_started_ends_with_its_trial(site: Any, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    started = f"""
import os, time
from pathlib import Path

pid = os.fork()
if pid == 0:
    time.sleep(600)
Path({str(note)!r}).write_text(str(pid))
"""
    entries = add(site, good=started + GOOD)
    assert [found.failure for found in try_imports(entries).values()] == [None]
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(note.read_text())).wait(timeout=60)


def test_a_trial_ends_with_who_asked(site: Any) -> None:
    site.add("it", {"policy.it": "it"}, {"it/__init__.py": f"TPSERVE_API = 1\n{STUBBORN}"})
    with subprocess.Popen([sys.executable, "-c", ASK.format(before="")]) as asking:
        deadline = time.monotonic() + 60
        while not (children := psutil.Process(asking.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)
        asking.send_signal(signal.SIGKILL)

    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert len(children) == 1
