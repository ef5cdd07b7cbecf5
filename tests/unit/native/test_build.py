from __future__ import annotations

import ctypes
import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tpserve.errors import UnavailablePlugin
from tpserve.native import build
from tpserve.native.build import COMPILERS, built_library, prepare, probe
from tpserve.native.signatures import SYMBOLS
from tpserve.weights import cache

COMPILER = """\
#!/bin/sh
case "$*" in *--version*) echo "cc {version}"; exit;; esac
echo run >> {log}
{action}
for last; do :; done
echo library > "$last"
"""


class Compiler:
    """A made-up compiler, with a note of each run."""

    def __init__(self, folder: Path) -> None:
        self.path, self.log = folder / "c++", folder / "log"

    def write(self, action: str = "", version: str = "1") -> None:
        self.path.write_text(COMPILER.format(log=self.log, action=action, version=version))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """One that works, and a cache of the test's own."""
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / "cache"))
    found = Compiler(tmp_path)
    found.write()
    monkeypatch.setenv("CXX", str(found.path))
    monkeypatch.setattr(build, "_flaw", lambda library: "" if library.read_text() == "library\n" else "no library")
    return found


def test_the_library_is_compiled_once(compiler: Compiler) -> None:
    first = built_library()
    assert first.read_text() == "library\n"
    assert built_library() == first
    assert compiler.runs == 1


def test_several_that_start_at_once_share_one_compilation(compiler: Compiler) -> None:
    compiler.write(action="sleep 0.3")
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: built_library(), range(4)))
    assert len(found) == compiler.runs == 1


def test_another_compiler_makes_another_library(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built_library()
    compiler.write(version="2")
    second = built_library()
    monkeypatch.setenv("CXX", f"{compiler.path} -DMORE")
    assert len({first, second, built_library()}) == 3


def test_another_processor_makes_another_library(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    info = compiler.path.with_name("cpuinfo")
    monkeypatch.setattr("tpserve.native.build.CPU_INFO", info)
    found = set()
    for flags in ("sse avx", "sse"):
        info.write_text(f"processor\t: 0\nflags\t\t: {flags}\nMHz\t: {flags}\n\nprocessor\t: 1\n")
        found.add(built_library())
    info.write_text("processor\t: 0\nflags\t\t: sse\nMHz\t: other\n\nprocessor\t: 1\n")
    found.add(built_library())
    assert len(found) == 2


def test_who_starts_is_told_once_that_it_takes_a_while(compiler: Compiler) -> None:
    said: list[str] = []
    prepare(said.append)
    prepare(said.append)
    (line,) = said
    assert line == f"compiling the CPU kernels into {built_library().parent} (once, some seconds)"


def test_a_compiler_that_fails_is_reported_and_tried_again(compiler: Compiler) -> None:
    compiler.write(action="echo 'fatal error: omp.h: none' >&2; exit 1")
    prepare(lambda _: None)
    assert probe() == (
        f"{compiler.path} cannot compile the kernels: fatal error: omp.h: none: set CXX to a C++ compiler, such as g++"
    )
    compiler.write()
    assert built_library().exists()


def test_a_full_disk_is_not_the_compiler_s_fault(compiler: Compiler) -> None:
    lines = ["/usr/bin/ld: final link failed: No space left on device", "collect2: error: ld returned 1 exit status"]
    compiler.write(action="; ".join(f"echo '{line}' >&2" for line in lines) + "; exit 1")
    assert probe() == (
        f"{compiler.path} cannot compile the kernels: {lines[0]}: "
        "set TPSERVE_CACHE and TMPDIR to folders of another disk, or free some space"
    )


def cut(library: Path) -> None:
    os.truncate(library, 3)


def zero(library: Path) -> None:
    library.write_bytes(bytes(library.stat().st_size))


def make_folder(library: Path) -> None:
    library.unlink()
    (library / "deep").mkdir(parents=True)


def make_file_of_folder(library: Path) -> None:
    shutil.rmtree(library.parent)
    library.parent.write_text("")


@pytest.mark.parametrize("damage", [Path.unlink, cut, zero, make_folder, make_file_of_folder])
@pytest.mark.parametrize("use", [probe, built_library, lambda: prepare(lambda _: None)])
def test_a_damaged_library_is_compiled_anew(
    compiler: Compiler, damage: Callable[[Path], None], use: Callable[[], object]
) -> None:
    library = built_library()
    damage(library)
    for _ in range(2):
        use()
        assert library.read_text() == "library\n"
        assert compiler.runs == 2


def test_several_that_find_it_damaged_compile_it_once(compiler: Compiler) -> None:
    library = built_library()
    zero(library)
    compiler.write(action="sleep 0.3")
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda _: probe(), range(4))] == [None] * 4
    assert compiler.runs == 2


def test_one_that_this_machine_can_no_longer_load_is_compiled_anew(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_library()
    answers = iter(["libgomp.so.1: cannot open shared object file", "the same again", ""])
    monkeypatch.setattr(build, "_flaw", lambda _: next(answers))
    assert probe() is None
    assert compiler.runs == 2


def test_a_ready_library_needs_no_cache_that_can_be_written(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = built_library()
    monkeypatch.setattr(cache, "_open_lock", None)
    assert probe() is None
    assert built_library() == library


def test_what_cannot_be_loaded_is_reported_and_not_kept(compiler: Compiler) -> None:
    compiler.write(action='for last; do :; done; echo half > "$last"; exit')
    assert probe() == (
        f"what {compiler.path} compiles cannot be loaded: no library: set CXX to a C++ compiler, such as g++"
    )
    compiler.write()
    assert probe() is None


def test_a_flaw_is_what_the_loader_says(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    assert "No such file" in build._flaw(library)
    library.write_bytes(b"\x7fELF")
    assert "file too short" in build._flaw(library)


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler")
def test_so_is_a_symbol_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    library = tmp_path / "kernels.so"
    build._run([*build._compiler(), "-shared", "-xc++", os.devnull, "-o", str(library)])
    ctypes.CDLL(str(library))
    assert build._flaw(library) == f"{library}: undefined symbol: {SYMBOLS[0]}"


def test_without_a_compiler(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert probe() == "there is no C++ compiler: install g++, or set CXX"
    with pytest.raises(UnavailablePlugin) as caught:
        built_library()
    assert caught.value.hint == "Install g++, or set CXX"
    monkeypatch.setenv("CXX", os.fspath(tmp_path / "gone"))
    assert "gone cannot be run" in (probe() or "")


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [('g++ "', "CXX is 'g++ \"': No closing quotation"), (" ", "CXX is ' ', which names no compiler")],
)
def test_a_compiler_that_is_no_command(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, chosen: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", chosen)
    prepare(lambda _: None)
    assert probe() == f"{reason}: set CXX to a C++ compiler, such as g++"


def test_a_cache_that_cannot_be_written_is_reported(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSERVE_CACHE", str(compiler.path / "cache"))
    reason = probe() or ""
    assert "cannot write the cache" in reason
    assert "set TPSERVE_CACHE to a folder" in reason
