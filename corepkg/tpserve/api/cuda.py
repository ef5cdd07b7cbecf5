"""CUDA devices as the driver sees them: asking it takes a moment, importing torch for it takes seconds."""

from __future__ import annotations

import ctypes

__all__ = ["cuda_devices", "no_cuda"]

MAJOR, MINOR = 75, 76
"""The driver's numbers for the two parts of the compute capability."""


def cuda_devices() -> list[int]:
    """The compute capability times ten of each device that this process may use.

    Raises:
        OSError: there is no driver, or it does not work; the message says why.
    """
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> int:
        value = ctypes.c_int()
        code = getattr(driver, name)(ctypes.byref(value), *arguments)
        if code:
            raise OSError(f"the CUDA driver's {name} returned error {code}")
        return value.value

    code = driver.cuInit(0)
    if code:
        raise OSError(f"the CUDA driver's cuInit returned error {code}")
    devices = [call("cuDeviceGet", index) for index in range(call("cuDeviceGetCount"))]
    return [
        10 * call("cuDeviceGetAttribute", MAJOR, each) + call("cuDeviceGetAttribute", MINOR, each) for each in devices
    ]


def no_cuda() -> str | None:
    """A plugin's probe: why nothing can be computed on a CUDA device here, or None."""
    try:
        return None if cuda_devices() else "there is no CUDA device"
    except OSError as error:
        return f"there is no CUDA device: {error}"
