"""``tpserve plugins new``: what it writes is in good form, and what it refuses."""

from __future__ import annotations

import importlib
import re
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tpserve.api import KINDS, SyncContext
from tpserve.errors import ConfigError, DeadlineExceeded, PeerLost
from tpserve.plugins.new import LONGEST_NAME, distribution_name, taken_by, template_kinds, usage, write_package
from tpserve.plugins.registry import Registry
from tpserve.testing.lab import Task

ROOT = Path(__file__).parents[3]
LINT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
NAMES = ["x", "my_idea", "a" * LONGEST_NAME, "in_" * 7 + "all"]


def test_every_kind_has_a_template() -> None:
    assert set(template_kinds()) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_is_complete(tmp_path: Path, kind: str) -> None:
    files = write_package(kind, "my_idea", tmp_path / "new")

    package = f"src/tpserve_{kind}_my_idea"
    assert {file.relative_to(tmp_path / "new").as_posix() for file in files} == {
        "README.md",
        "pyproject.toml",
        "tests/test_contract.py",
        *(f"{package}/{name}" for name in ("__init__.py", "plugin.py", f"{kind}.py", "py.typed")),
    }
    project = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())
    assert project["project"]["name"] == distribution_name(kind, "my_idea") == f"tpserve-{kind}-my-idea"
    assert project["project"]["entry-points"]["tpserve"] == {f"{kind}.my_idea": f"tpserve_{kind}_my_idea.plugin"}
    for file in files:
        assert "$" not in file.read_text(), file


@pytest.mark.parametrize("kind", KINDS)
def test_its_readme_says_how_ranks_come_to_use_it(tmp_path: Path, kind: str) -> None:
    write_package(kind, "mine", tmp_path)

    flags = usage(kind, "mine")

    assert f"tpserve launch {flags}" in (tmp_path / "README.md").read_text()
    assert flags.endswith(" --tp 2") == (kind in ("transport", "sync", "comm"))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_to_write(tmp_path: Path, kind: str) -> None:
    for file in write_package(kind, "mine", tmp_path):
        assert not re.search("NotImplementedError|TODO|FIXME", file.read_text()), file
    assert "Your idea goes here" in (tmp_path / "src" / f"tpserve_{kind}_mine" / f"{kind}.py").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_packages_are_formatted_and_pass_the_linter(tmp_path: Path, name: str) -> None:
    for kind in KINDS:
        write_package(kind, name, tmp_path / kind)
        form = ["--isolated", "--line-length=120"]
        rules = [f"--select={','.join(LINT['select'])}", f"--ignore={','.join(LINT['ignore'])}"]
        rules += ["--target-version=py311", "--per-file-ignores=tests/**:D", "--per-file-ignores=tests/**:S"]
        for command in (["format", "--check", *form], ["check", *form, *rules]):
            done = subprocess.run(
                [sys.executable, "-m", "ruff", *command, "."],
                cwd=tmp_path / kind,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("polcy", "mine", "there is no template for a kind 'polcy'. Did you mean 'policy'?"),
        ("shared", "mine", "there is no template for a kind 'shared'"),
        ("policy", "Mine", "'Mine' cannot be a plugin's name. A name is up to 24 lower-case letters, "),
        ("policy", "my-idea", "'my-idea' cannot be a plugin's name"),
        ("policy", "my__idea", "cannot be a plugin's name"),
        ("policy", "../mine", "cannot be a plugin's name"),
        ("policy", "", "'' cannot be a plugin's name"),
        ("policy", "a" * 25, "cannot be a plugin's name"),
        ("sync", "auto", "'auto' cannot be a plugin's name. Flags give it another meaning"),
    ],
)
def test_a_wrong_kind_or_name_is_refused(tmp_path: Path, kind: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write_package(kind, name, tmp_path / "new")

    assert says in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, says in (
        (tmp_path, "is not empty"),
        (tmp_path / "file", "Not a directory"),
        (Path("/proc/x"), "cannot"),
    ):
        with pytest.raises(ConfigError, match=says):
            write_package("policy", "mine", folder)

    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_name_may_be_taken() -> None:
    entries = Registry.discover().entries()

    assert (taken_by(entries, "policy", "fcfs") or "").startswith("tpserve ")
    assert taken_by(entries, "policy", "zmq") is None


def test_a_package_that_pip_replaces_takes_no_name(site: Any) -> None:
    """As when one writes it anew in another folder."""
    site.add("Tpserve_policy.my-idea", {"policy.my_idea": "mine.plugin"}, {"mine/plugin.py": ""})
    site.add("other", {"policy.your_idea": "other.plugin"}, {"other/plugin.py": ""})
    entries = Registry.discover().entries()

    assert taken_by(entries, "policy", "my_idea") is None
    assert (taken_by(entries, "policy", "your_idea") or "").startswith("other ")


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("attention", "torch", " has an attention plugin named torch too"),
        ("ops", "torch", " has an ops plugin named"),
        ("sync", "shm", " has a sync plugin named"),
    ],
)
def test_the_note_about_a_name_that_is_taken_is_english(run_cli: Any, kind: str, name: str, says: str) -> None:
    assert says in run_cli("plugins", "new", kind, name).stderr


def test_the_command_writes_and_says_what_is_next(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("plugins", "new", "policy", "fcfs")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tpserve-policy-fcfs" / "pyproject.toml").exists()
    assert "pip install -e 'tpserve-policy-fcfs[dev]'" in done.stdout
    assert done.stdout.endswith("tpserve launch --policy fcfs\n")
    assert done.stderr.startswith("note: tpserve ")
    again = run_cli("plugins", "new", "policy", "fcfs")
    assert again.returncode == 2
    assert again.stderr == "error: tpserve-policy-fcfs is not empty\nhint: Choose another with --dir\n"
    assert run_cli("plugins", "new", "policy", "fcfs", "--dir", "other").returncode == 0


@pytest.mark.parametrize("greeting", [b"\x00", b"\x02\x00\x00\x00", b"nobody"])
def test_a_new_transport_s_leader_greets_followers_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    write_package("transport", "greeter", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    transport = importlib.import_module("tpserve_transport_greeter.transport")
    leader = transport.Sender(tmp_path / "door", 2, 1 << 16)
    with closing(leader), socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "door"))
        stranger.send(greeting)
        stranger.shutdown(socket.SHUT_WR)

        with pytest.raises(DeadlineExceeded, match="0 of 2"):
            leader.connect(time.monotonic() + 0.3)

        stranger.settimeout(30)
        with suppress(ConnectionResetError):  # there was more to read
            assert stranger.recv(1) == b""


def test_a_new_transport_s_leader_misses_a_follower_that_came_and_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package("transport", "misser", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    transport = importlib.import_module("tpserve_transport_misser.transport")
    leader = transport.Sender(tmp_path / "door", 2, 1 << 16)
    with closing(leader):
        come = transport.GREETING.pack(transport.MAGIC, 0)
        _come_and_go(tmp_path / "door", socket.SOCK_STREAM, come, Task(leader.connect, time.monotonic() + 30))


def test_a_new_sync_s_leader_misses_a_rank_that_came_and_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package("sync", "misser", tmp_path / "new")
    monkeypatch.syspath_prepend(str(tmp_path / "new" / "src"))
    (package,) = (tmp_path / "new" / "src").iterdir()
    plugin, sync = (importlib.import_module(f"{package.name}.{name}") for name in ("plugin", "sync"))
    (spec,) = plugin.tpserve_syncs()
    kind = getattr(sync, spec.factory.partition(":")[2])
    context: Any = SyncContext(0, 3, tmp_path, "door", None)  # type: ignore[arg-type]
    with closing(kind(spec.options(), context)) as leader:
        come = sync.GREETING.pack(sync.MAGIC, 1)
        _come_and_go(tmp_path / "door", socket.SOCK_SEQPACKET, come, Task(leader.connect, time.monotonic() + 30))


def _come_and_go(door: Path, kind: socket.SocketKind, greeting: bytes, leading: Task[None]) -> None:
    """As a follower that is killed while others are awaited: the leader says so soon."""
    with socket.socket(socket.AF_UNIX, kind) as follower:
        while follower.connect_ex(str(door)):
            time.sleep(0.01)
        follower.send(greeting)
        time.sleep(0.2)
        assert not leading.is_done
    with pytest.raises(PeerLost):
        leading.result(5)
