"""Made-up installed distributions, and the command line in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session", autouse=True)
def imports(tpserve_imports: None) -> None:
    """For tests that are not guarded too: some run guarded ones in a pytest of their own."""


@pytest.fixture(scope="session", autouse=True)
def signals() -> None:
    """What ``nohup`` and shells have processes in the background ignore, and those that are started here inherit."""
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGHUP else signal.default_int_handler)


class Site:
    """A folder on the path into which distributions are installed by writing their files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self, name: str, entry_points: Mapping[str, str], files: Mapping[str, str] = {}, version: str = "1.0"
    ) -> None:
        """Install a distribution: entry points of group tpserve, and modules with their source."""
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{key} = {value}" for key, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[tpserve]", *lines, ""]))
        for file, source in files.items():
            target = self.path / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(dedent(source))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site, seen by this process and by those it starts."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
    yield Site(path)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(path)):
            del sys.modules[name]


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCli:
    """Run ``tpserve`` with arguments in a process of its own, outside the checkout."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tpserve.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)

    return run
