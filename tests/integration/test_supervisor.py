"""The supervisor over children that misbehave: no model, no torch, no transport."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes import by_name

HERE = Path(__file__).parent
HANG = 60.0
MEMBERS = ["tokenizer0", "rank0", "rank1", "detokenizer0"]

Behaviour = dict[str, dict[str, dict[str, str]]]


class Server:
    """A supervisor under test, with all it started."""

    def __init__(self, base: Path, behaviour: Behaviour, forked: list[str], patience: dict[str, Any]) -> None:
        self.base = base
        scenario = {
            "members": MEMBERS,
            "behaviour": behaviour,
            "forked": forked,
            "patience": {"backoff": 0.05, "startup": HANG, **patience},
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "supervised_main.py"), json.dumps(scenario), str(base)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.run_dir = Path(self.line().split()[1])
        self.seen: dict[int, psutil.Process] = {}

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def await_ready(self, times: int = 1) -> None:
        for _ in range(times):
            while not (line := self.line()).startswith("ready"):
                assert line, self.process.communicate()[1]
        self.look()

    def look(self) -> dict[str, psutil.Process]:
        """The children that run now, by name."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.seen.update({child.pid: child for child in children})
        return by_name(children)

    def await_children(self) -> dict[str, psutil.Process]:
        return wait_for(lambda: found if {"api", *MEMBERS} <= (found := self.look()).keys() else None)

    def await_file(self, name: str, generation: int = 1) -> Path:
        path = self.run_dir / f"g{generation}" / name
        return wait_for(lambda: path if path.exists() else None)

    def trigger(self, generation: int = 1) -> None:
        (self.run_dir / f"g{generation}" / "trigger").touch()

    def events(self) -> list[str]:
        path = self.base / "events"
        return [line.split("(")[0] for line in path.read_text().splitlines()] if path.exists() else []

    def end(self) -> tuple[int, str]:
        """Wait for the end; nothing may be left. The exit code and what was logged."""
        _, log = self.process.communicate(timeout=HANG)
        _gone, alive = psutil.wait_procs(self.seen.values(), timeout=5)
        assert not alive
        return self.process.returncode, log

    def left(self) -> list[str]:
        return [path.name for path in self.base.iterdir() if path.is_dir()]


def wait_for(condition: Any) -> Any:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        found = condition()
        if found is not None:
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


@pytest.fixture
def start() -> Iterator[Any]:
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="tp") as base:
        Path(base).chmod(0o700)

        def launch(behaviour: Behaviour | None = None, forked: list[str] | None = None, **patience: Any) -> Server:
            servers.append(Server(Path(base), behaviour or {}, forked or [], patience))
            return servers[-1]

        yield launch
        for server in servers:
            server.process.kill()
            server.process.wait()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_all_leave_in_order(start: Any, signum: signal.Signals) -> None:
    server = start()
    server.await_ready()
    assert set(server.look()) == {"api", *MEMBERS}
    server.process.send_signal(signum)
    assert server.end()[0] == 0
    assert server.events() == ["ServeEvent", "StopEvent"]
    assert server.left() == []


def test_ranks_leave_in_order_though_their_fork_server_was_stopped(start: Any) -> None:
    """It cannot tell how they have ended, and nobody else is to blame."""
    server = start(forked=["rank0", "rank1"])
    server.await_ready()
    server.look()["forkserver"].suspend()
    server.process.send_signal(signal.SIGTERM)
    code, log = server.end()
    assert (code, "ERROR" in log) == (0, False), log
    assert "rank0 ended with no report of how: its fork server stands still" in log
    assert server.left() == []


def test_nohup_outlives_its_terminal(start: Any) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = start()
    finally:
        signal.signal(signal.SIGHUP, former)
    server.await_ready()
    server.process.send_signal(signal.SIGHUP)
    server.look()["rank1"].kill()
    server.await_ready()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_ctrl_c_in_a_terminal_reaches_the_supervisor_alone(start: Any) -> None:
    server = start()
    server.await_ready()
    sessions = {os.getsid(child.pid) for child in server.look().values()}
    assert os.getsid(server.process.pid) not in sessions
    for child in server.look().values():
        child.send_signal(signal.SIGINT)
    server.process.send_signal(signal.SIGINT)
    code, log = server.end()
    assert (code, "ERROR" in log) == (0, False)


def test_a_second_signal_stops_at_once(start: Any) -> None:
    server = start({"rank1": {"*": {"leaving": "hang-deaf"}}}, drain=HANG)
    server.await_ready()
    server.process.send_signal(signal.SIGINT)
    server.await_file("deaf")
    server.process.send_signal(signal.SIGINT)
    assert server.end()[0] == 128 + signal.SIGINT
    assert server.left() == []


def test_a_hangup_after_the_first_signal_cuts_nothing_short(start: Any) -> None:
    """As from a service manager, which sends it to all processes."""
    server = start({"rank1": {"*": {"leaving": "slow"}}})
    server.await_ready()
    children = server.look()
    server.process.send_signal(signal.SIGTERM)
    for process in [*children.values(), server.process]:
        process.send_signal(signal.SIGHUP)
    code, log = server.end()
    assert (code, "ERROR" in log) == (0, False), log


def test_a_death_while_stopping_is_told_before_the_end(start: Any) -> None:
    """So that clients hear of it, and are not cut off."""
    server = start({"rank1": {"*": {"leaving": "killed"}}}, drain=HANG)
    server.await_ready()
    (server.base / "draining").touch()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 1
    assert server.events() == ["ServeEvent", "StopEvent", "DownEvent"]
    assert server.left() == []


def test_a_signal_while_starting_stops_at_once(start: Any) -> None:
    server = start({"rank1": {"*": {"loading": "hang-deaf"}}})
    server.await_file("deaf")
    server.look()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 128 + signal.SIGTERM
    assert server.left() == []


@pytest.mark.parametrize(
    ("leaving", "exit_code", "said"),
    [
        ("hang-deaf", 0, "did not leave: rank1"),
        ("peer-lost", 0, "rank1 failed: PeerLost: the peer has gone"),
        ("crash", 1, "rank1 failed: ZeroDivisionError: a crash on purpose"),
    ],
)
def test_when_all_clients_are_served_only_a_crash_spoils_the_end(
    start: Any, leaving: str, exit_code: int, said: str
) -> None:
    server = start({"rank1": {"*": {"leaving": leaving}}}, drain=0, leave=0.5)
    server.await_ready()
    server.process.send_signal(signal.SIGTERM)
    code, log = server.end()
    assert code == exit_code, log
    assert said in log


@pytest.mark.parametrize("name", ["rank0", "tokenizer0", "api"])
def test_a_process_that_is_stopped_is_as_good_as_dead(start: Any, name: str) -> None:
    server = start(watchdog=1.0)
    server.await_ready()
    server.look()[name].suspend()
    server.await_ready()
    server.process.send_signal(signal.SIGTERM)
    code, log = server.end()
    assert code == 0
    assert f"{name} has not answered for 1 s" in log


def test_a_main_loop_that_turns_no_more_is_noticed(start: Any) -> None:
    server = start({"rank1": {"1": {"serving": "stuck"}}}, watchdog=1.0)
    server.await_ready()
    server.trigger()
    server.await_ready()
    server.process.send_signal(signal.SIGTERM)
    assert "rank1 has not answered for 1 s" in server.end()[1]


def test_nobody_is_blamed_while_the_supervisor_is_stopped_or_for_work_that_goes_on(start: Any) -> None:
    server = start({"rank1": {"1": {"serving": "slow"}}}, watchdog=3.0)
    server.await_ready()
    server.trigger()
    supervisor = psutil.Process(server.process.pid)
    supervisor.suspend()
    time.sleep(4.0)
    supervisor.resume()
    time.sleep(1.0)
    server.process.send_signal(signal.SIGTERM)
    code, log = server.end()
    assert code == 0
    assert "has not answered" not in log


def test_kill_9_leaves_no_process_and_the_next_start_sweeps(start: Any) -> None:
    server = start({"rank1": {"*": {"serving": "hang-deaf"}}})
    server.await_ready()
    server.trigger()
    server.await_file("deaf")
    segment = Path("/dev/shm") / f"tpserve-{server.run_dir.name}-g1-test"
    segment.touch()
    server.process.kill()
    assert server.end()[0] == -signal.SIGKILL
    assert server.left() == [server.run_dir.name]
    again = start()
    again.await_ready()
    assert again.left() == [again.run_dir.name]
    assert not segment.exists()


def test_a_failure_while_starting_ends_all_with_one_traceback(start: Any) -> None:
    server = start({"rank0": {"*": {"loading": "hang-deaf"}}, "rank1": {"*": {"loading": "crash"}}})
    code, log = server.end()
    assert code == 1
    assert log.count("Traceback") == log.count("rank1 failed") == 1
    assert log.count("ZeroDivisionError: a crash on purpose") == 1
    assert server.left() == []


def test_what_the_user_can_mend_comes_without_a_traceback(start: Any) -> None:
    server = start({"rank0": {"*": {"loading": "user-error"}}, "rank1": {"*": {"loading": "user-error"}}})
    code, log = server.end()
    assert (code, log) == (2, "error: the model is wrong / Take another one\n")


def test_a_death_while_starting_names_process_and_signal(start: Any) -> None:
    server = start({"rank1": {"*": {"loading": "killed"}}})
    code, log = server.end()
    assert code == 1
    assert "rank1 ended with signal SIGKILL" in log


def test_the_start_has_a_deadline(start: Any) -> None:
    server = start({"rank1": {"*": {"loading": "hang"}}}, startup=3.0)
    code, log = server.end()
    assert code == 1
    assert "not ready within 3 s: rank1" in log


def test_a_death_is_followed_by_the_next_generation(start: Any) -> None:
    server = start()
    server.await_ready()
    before = server.look()
    before["rank1"].kill()
    server.await_ready()
    after = server.look()
    assert set(after) == set(before)
    assert [name for name in after if after[name].pid == before[name].pid] == ["api"]
    assert not (server.run_dir / "g1").exists()
    server.process.send_signal(signal.SIGTERM)
    code, log = server.end()
    assert code == 0
    assert "rank1 ended with signal SIGKILL" in log
    assert server.events() == ["ServeEvent", "DownEvent", "ServeEvent", "StopEvent"]


def test_a_signal_between_generations_lets_the_api_process_say_so(start: Any) -> None:
    server = start({"rank1": {"2": {"loading": "hang-deaf"}}})
    server.await_ready()
    server.await_children()["rank1"].kill()
    server.await_file("deaf", generation=2)
    server.look()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 128 + signal.SIGTERM
    assert server.events() == ["ServeEvent", "DownEvent", "StopEvent"]
    assert server.left() == []


def test_a_dead_api_process_is_started_again_with_all_others(start: Any) -> None:
    server = start()
    server.await_ready()
    before = server.look()
    before["api"].kill()
    server.await_ready()
    assert {child.pid for child in server.look().values()}.isdisjoint(child.pid for child in before.values())


def test_the_process_that_died_is_blamed_and_not_its_peers(start: Any) -> None:
    server = start({"rank0": {"1": {"serving": "peer-lost"}}, "rank1": {"1": {"serving": "killed"}}})
    server.await_ready()
    server.trigger()
    server.await_ready()
    server.process.send_signal(signal.SIGTERM)
    code, log = server.end()
    assert code == 0
    assert "rank1 ended with signal SIGKILL" in log
    assert "PeerLost" not in log


def test_it_gives_up_after_so_many_restarts(start: Any) -> None:
    server = start({"rank1": {"*": {"loading": "crash"}, "1": {}}}, restarts=2)
    server.await_ready()
    server.await_children()["rank1"].kill()
    code, log = server.end()
    assert code == 1
    assert "starting again in 0.05 s (1 of 2)" in log
    assert "starting again in 0.1 s (2 of 2)" in log
    assert "giving up after 2 restarts" in log
    assert server.events() == ["ServeEvent", "DownEvent", "DownEvent", "DownEvent", "StopEvent"]
    assert server.left() == []
