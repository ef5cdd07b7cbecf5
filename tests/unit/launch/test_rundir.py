from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tpserve.errors import LaunchError
from tpserve.launch.layout import Layout
from tpserve.launch.rundir import RunDir, run_base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def segment() -> Iterator[Path]:
    """A name in shared memory for the test to make its own of."""
    made = Path("/dev/shm") / f"tpserve-test{os.getpid()}-sync"
    yield made
    made.unlink(missing_ok=True)


def directories(base: Path) -> list[Path]:
    return [path for path in base.iterdir() if path.is_dir()]


def test_it_is_private_and_goes_with_all_in_it(base: Path) -> None:
    with RunDir.create(base) as run_dir:
        assert run_dir.path.stat().st_mode & 0o777 == 0o700
        Layout(run_dir.path, 1).create()
        (run_dir.path / "g1" / "socket").touch()
    assert directories(base) == []
    run_dir.remove()


def test_the_base_is_made_private(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "new"):
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_base_that_others_may_enter_is_refused(base: Path) -> None:
    base.chmod(0o755)
    with pytest.raises(LaunchError, match="mode 0700"):
        RunDir.create(base)


def test_a_base_that_is_a_link_is_refused(tmp_path: Path, base: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(base)
    with pytest.raises(LaunchError, match="must be a directory"):
        RunDir.create(link)


def test_a_live_directory_survives_other_starts(base: Path) -> None:
    with RunDir.create(base) as first, RunDir.create(base) as second:
        assert set(directories(base)) == {first.path, second.path}
        assert (first.path / "pid").read_text() == f"{os.getpid()}\n"


def test_a_killed_process_directory_is_swept_with_its_segments(base: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from tpserve.launch.rundir import RunDir
run_dir = RunDir.create(Path({str(base)!r}))
(Path("/dev/shm") / f"tpserve-{{run_dir.path.name}}-g1-sync").touch()
print(run_dir.path.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    dead = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    segment = Path("/dev/shm") / f"tpserve-{dead.stdout.strip()}-g1-sync"
    assert [path.name for path in directories(base)] == [dead.stdout.strip()]
    assert segment.exists()
    with RunDir.create(base) as run_dir:
        assert directories(base) == [run_dir.path]
        assert not segment.exists()


def test_segments_of_others_are_left_alone(base: Path, segment: Path) -> None:
    segment.touch()
    with RunDir.create(base):
        pass
    assert segment.exists()


def test_a_generation_goes_with_its_segments_and_leaves_others(base: Path) -> None:
    with RunDir.create(base) as run_dir:
        first, second = Layout(run_dir.path, 1), Layout(run_dir.path, 2)
        for layout in (first, second):
            layout.create()
            (Path("/dev/shm") / layout.name("sync")).touch()
        first.remove()
        assert not first.directory.exists()
        assert second.directory.exists()
        assert not (Path("/dev/shm") / first.name("sync")).exists()
        assert (Path("/dev/shm") / second.name("sync")).exists()
    assert not (Path("/dev/shm") / second.name("sync")).exists()


def test_the_base_is_the_runtime_directory_if_that_is_private_and_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    fallback = Path(f"/tmp/tpserve-{os.getuid()}")
    short = Path("/proc/self/cwd")
    assert run_base({}) == fallback
    assert run_base({"XDG_RUNTIME_DIR": str(tmp_path / "missing")}) == fallback
    assert run_base({"XDG_RUNTIME_DIR": str(tmp_path / ("x" * 60))}) == fallback
    assert run_base({"XDG_RUNTIME_DIR": str(short)}) == fallback  # a link
    (tmp_path / "here").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    assert run_base({"XDG_RUNTIME_DIR": "here"}) == fallback
    if len(str(tmp_path)) < 60:
        assert run_base({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "tpserve"


def test_addresses_are_distinct_and_short_enough_for_a_unix_socket() -> None:
    layout = Layout(Path("/" + "b" * 59) / "12345678", 999)
    addresses = [layout.to_api, layout.to_rank0, layout.fanout, layout.to_tokenizer(99), layout.to_detokenizer(99)]
    assert len(set(addresses)) == len(addresses)
    assert all(address.startswith(f"ipc://{layout.directory}/") for address in addresses)
    assert max(map(len, addresses)) - len("ipc://") + len(".999") <= 107


@pytest.mark.parametrize("refuses", ["mkdir", "write", "statvfs"])
def test_a_file_system_without_room_is_one_error(refuses: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        if refuses == "statvfs":
            return SimpleNamespace(f_files=100, f_favail=12)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path if refuses == "mkdir" else os, refuses, refuse)
    with pytest.raises(LaunchError, match="cannot be made: No space left on device") as found:
        RunDir.create(base)
    assert "XDG_RUNTIME_DIR" in found.value.hint
    monkeypatch.undo()
    assert directories(base) == []
