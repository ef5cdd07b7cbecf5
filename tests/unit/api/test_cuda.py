from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tpserve.api.cuda import MAJOR, cuda_devices, no_cuda


class Driver:
    """A driver with two devices, called 7 and 8, unless a call is to fail."""

    def __init__(self, failing: str = "", devices: tuple[int, ...] = (90, 120)) -> None:
        self.failing = failing
        self.devices = devices

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 100 if self.failing == "cuInit" else 0

    def cuDeviceGetCount(self, out: Any) -> int:  # noqa: N802
        return self._answer("cuDeviceGetCount", out, len(self.devices))

    def cuDeviceGet(self, out: Any, index: int) -> int:  # noqa: N802
        return self._answer("cuDeviceGet", out, 7 + index)

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:  # noqa: N802
        major, minor = divmod(self.devices[device - 7], 10)
        return self._answer("cuDeviceGetAttribute", out, major if attribute == MAJOR else minor)

    def _answer(self, name: str, out: Any, value: int) -> int:
        out._obj.value = value
        return 999 if self.failing == name else 0


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)


def test_devices_have_their_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver())
    assert cuda_devices() == [90, 120]
    assert no_cuda() is None
    install(monkeypatch, Driver(devices=()))
    assert no_cuda() == "there is no CUDA device"


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_what_fails_is_named(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver(failing))
    reason = no_cuda()
    assert reason is not None
    assert f"the CUDA driver's {failing} returned error" in reason


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Driver:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert no_cuda() == "there is no CUDA device: libcuda.so.1: cannot open shared object file"
