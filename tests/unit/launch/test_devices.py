from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tpserve.launch import devices
from tpserve.launch.devices import find_accelerators


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for a driver."""
    path = tmp_path / "driver"
    path.touch()
    monkeypatch.setattr(devices, "DRIVER", (path,))
    return path


@pytest.fixture
def torch_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The version file of a torch that exists for the finder only."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return package / "version.py"


def test_without_a_driver_nobody_is_asked(driver: Path) -> None:
    driver.unlink()
    assert find_accelerators().reason == "no NVIDIA driver"


def test_a_torch_without_cuda_finds_nothing(driver: Path, torch_version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_version.write_text("__all__ = ['cuda']\ncuda: Optional[str] = None\n")
    monkeypatch.setattr(devices, "PROBE", "raise AssertionError")
    assert find_accelerators().reason == "this torch is built without CUDA"


@pytest.mark.parametrize(
    ("probe", "count", "sm", "reason"),
    [
        ("print('a warning'); print('[100, 90]')", 2, 90, ""),
        ("print('[]')", 0, 0, "the driver sees no CUDA device"),
        ("raise RuntimeError('driver too old')", 0, 0, "RuntimeError: driver too old"),
        ("import time; time.sleep(60)", 0, 0, "the driver did not answer within 1 s"),
    ],
)
def test_the_driver_is_asked_in_a_child(
    driver: Path,
    torch_version: Path,
    monkeypatch: pytest.MonkeyPatch,
    probe: str,
    count: int,
    sm: int,
    reason: str,
) -> None:
    torch_version.write_text("cuda: Optional[str] = '12.8'\n")
    monkeypatch.setattr(devices, "PROBE", probe)
    monkeypatch.setattr(devices, "PROBE_SECONDS", 1.0 if "sleep" in probe else 60.0)
    found = find_accelerators()
    assert (found.count, found.sm, found.reason) == (count, sm, reason)
