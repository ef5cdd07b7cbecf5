"""The cache: where it is, hashes that are remembered, and folders that appear whole."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tpserve.errors import ModelError
from tpserve.weights import cache as module
from tpserve.weights.cache import build_once, cache_folder, content_hash, is_built


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TPSERVE_CACHE": "/a/b"}, "/a/b"),
        ({"TPSERVE_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"TPSERVE_CACHE": "~/c"}, "/home/somebody/c"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/tpserve"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/somebody/.cache/tpserve"),
        ({"TPSERVE_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/somebody/.cache/tpserve"),
        ({}, "/home/somebody/.cache/tpserve"),
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("TPSERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/somebody", **variables}.items():
        monkeypatch.setenv(name, value)

    assert cache_folder() == Path(expected)


def test_a_name_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSERVE_CACHE", "/a/\udcff")
    with pytest.raises(ModelError, match=r"the cache's name '/a/\\udcff' is not text in UTF-8"):
        cache_folder()


def test_a_hash_is_that_of_the_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one")
    assert content_hash(file) == hashlib.sha256(b"one").hexdigest()

    file.write_bytes(b"three")
    assert content_hash(file) == hashlib.sha256(b"three").hexdigest()


def test_a_hash_is_taken_once_while_size_and_time_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one")
    first = content_hash(file)
    taken: list[object] = []
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: taken.append(1) or hashlib.sha256(b"new"))

    assert content_hash(file) == first
    assert taken == []

    os.utime(file, ns=(1, 1))
    assert content_hash(file) == hashlib.sha256(b"new").hexdigest()


def test_a_damaged_note_is_ignored(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one")
    first = content_hash(file)
    (note,) = (cache / "hashes").iterdir()
    note.write_text("{")

    assert content_hash(file) == first


def test_a_hash_needs_no_cache_that_can_be_written(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    file = tmp_path / "file"
    file.write_bytes(b"one")

    assert content_hash(file) == hashlib.sha256(b"one").hexdigest()


def test_a_missing_file_has_no_hash(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*none"):
        content_hash(tmp_path / "none")


def never() -> None:
    raise AssertionError


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "content").write_text("whole")

    for _ in range(2):
        build_once(tmp_path / "deep" / "target", build, never)

    assert len(built) == 1
    assert (tmp_path / "deep" / "target" / "content").read_text() == "whole"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError

    with pytest.raises(ValueError):
        build_once(tmp_path / "target", build, never)

    assert not list(tmp_path.iterdir())


BUILDER = """
import sys
from pathlib import Path
from tpserve.weights.cache import build_once

def build(folder):
    print("building", flush=True)
    sys.stdin.read()
    (folder / "content").write_text("whole")

build_once(Path(sys.argv[1]), build, lambda: print("waiting", flush=True))
print("done", flush=True)
"""


def builder(target: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(target)], stdin=pipe, stdout=pipe, text=True)


def heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@contextmanager
def one_that_builds_and_one_that_waits(target: Path) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    with builder(target) as first:
        assert heard(first) == "building"
        with builder(target) as second:
            assert heard(second) == "waiting"
            yield first, second


def test_a_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with one_that_builds_and_one_that_waits(target) as (first, second):
        assert not target.exists()
        first.communicate(timeout=60)
        assert heard(second) == "done"  # without building

    assert (target / "content").read_text() == "whole"


def test_a_second_builder_goes_on_when_the_first_is_killed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with one_that_builds_and_one_that_waits(target) as (first, second):
        first.kill()
        assert heard(second) == "building"
        second.communicate(timeout=60)

    assert (target / "content").read_text() == "whole"


def test_whoever_waited_for_a_lock_that_is_gone_takes_the_one_that_is_there(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with one_that_builds_and_one_that_waits(target) as (first, second):
        (tmp_path / "target.lock").unlink()  # as a builder does that fails
        with builder(target) as third:
            assert heard(third) == "building"
            first.kill()
            assert heard(second) == "waiting"  # for the third
            third.communicate(timeout=60)
            assert heard(second) == "done"

    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_whoever_waited_for_a_lock_that_is_gone_makes_one(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with one_that_builds_and_one_that_waits(target) as (first, second):
        (tmp_path / "target.lock").unlink()
        first.kill()
        assert heard(second) == "building"
        with builder(target) as third:
            assert heard(third) == "waiting"
            second.communicate(timeout=60)
            assert heard(third) == "done"

    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("use", [is_built, lambda target: build_once(target, lambda _: None, never)])
def test_a_cache_that_cannot_be_written_says_so(cache: Path, use: Callable[[Path], object]) -> None:
    cache.write_text("a file where the folder should be")

    with pytest.raises(ModelError, match=r"cannot write the cache .*: Not a directory") as caught:
        use(cache / "models" / "x")
    assert "TPSERVE_CACHE" in caught.value.hint


def test_a_cache_that_cannot_be_looked_into_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", deny)
    with pytest.raises(ModelError, match=r"cannot write the cache .*: Permission denied"):
        is_built(cache / "models" / "x")


def test_a_cache_in_which_nothing_can_be_made_says_so_before_it_is_needed(cache: Path, tmp_path: Path) -> None:
    (cache / "models").parent.mkdir(parents=True)
    (cache / "models").symlink_to("/proc/self")  # where even root can make nothing

    with pytest.raises(ModelError, match=r"cannot write the cache .*: No such file"):
        is_built(cache / "models" / "x")


@pytest.mark.parametrize("linked", [False, True])
def test_what_is_wrong_with_a_conversion_says_how_to_get_a_whole_one(
    linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under whatever name the cache is known; of other folders nobody knows what would help."""
    for name in ("cache", "elsewhere"):
        (tmp_path / name / "models" / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to("cache")
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / ("link" if linked else "cache")))

    for name, hint in (("cache", f"Remove the folder {tmp_path / 'cache' / 'models' / 'x'}, and"), ("elsewhere", "?")):
        with pytest.raises(ModelError, match="torn") as caught, module.model_files(tmp_path / name / "models" / "x"):
            raise ModelError("torn", "?")
        assert caught.value.hint.startswith(hint)


def test_a_disk_that_is_full_is_told_with_what_helps(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    says = r"cannot write the cache .*: No space left on device"
    with pytest.raises(ModelError, match=says) as caught, module.in_cache(tmp_path / "target"):
        raise full
    assert caught.value.hint == "Set TPSERVE_CACHE to a folder of another disk, or free some space"


@pytest.mark.parametrize("place", ["target", "target.partial"])
@pytest.mark.parametrize("link", [False, True])
def test_what_is_no_folder_is_replaced(tmp_path: Path, place: str, link: bool) -> None:
    if link:
        (tmp_path / place).symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / place).write_text("a file where the folder should be")

    assert not is_built(tmp_path / "target")
    build_once(tmp_path / "target", lambda folder: (folder / "content").touch(), never)
    assert is_built(tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_what_is_built_is_found_where_nothing_can_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cache / "models" / "x"
    assert not is_built(target)
    target.mkdir()
    monkeypatch.setattr(module, "_open_lock", never)
    assert is_built(target)
    build_once(target, lambda _: None, never)


def test_a_folder_that_is_not_whole_is_built_anew(tmp_path: Path) -> None:
    target, content = tmp_path / "target", tmp_path / "target" / "content"

    def is_whole(folder: Path) -> bool:
        return (folder / "content").exists() and (folder / "content").read_text() == "whole"

    def build(folder: Path) -> None:
        (folder / "content").write_text("whole")

    target.mkdir()
    content.write_text("half")
    assert not is_built(target, is_whole)
    build_once(target, build, never, is_whole)
    assert content.read_text() == "whole"
    assert is_built(target, is_whole)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_home_that_nobody_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSERVE_CACHE", "~nobody-of-this-name/cache")

    with pytest.raises(ModelError, match="no home folder for the cache"):
        cache_folder()
