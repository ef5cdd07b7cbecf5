from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tpserve.errors import UnavailablePlugin
from tpserve.native.build import built_library, prepare, probe

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
    assert probe() == f"{compiler.path} cannot compile the kernels: fatal error: omp.h: none"
    compiler.write()
    assert built_library().exists()


def test_a_library_that_cannot_be_loaded_is_reported(compiler: Compiler) -> None:
    reason = probe()
    assert reason is not None
    assert reason.startswith("the compiled kernels cannot be loaded: ")


def test_without_a_compiler(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert probe() == "there is no C++ compiler"
    with pytest.raises(UnavailablePlugin) as caught:
        built_library()
    assert caught.value.hint == "Install g++, or set CXX"
    monkeypatch.setenv("CXX", os.fspath(tmp_path / "gone"))
    assert "gone cannot be run" in (probe() or "")


def test_a_cache_that_cannot_be_written_is_reported(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSERVE_CACHE", str(compiler.path / "cache"))
    assert "cannot write the cache" in (probe() or "")
