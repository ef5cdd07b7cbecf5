"""Which accelerators this machine has, found without importing torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import msgspec

from tpserve.errors import LaunchError

__all__ = ["Accelerators", "Device", "choose_device", "find_accelerators"]

DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""One of these is there where an NVIDIA driver is (the second under WSL)."""

PROBE = """
import json
from tpserve.api.cuda import cuda_devices
print(json.dumps(cuda_devices()))
"""

PROBE_SECONDS = 60.0


class Accelerators(msgspec.Struct, frozen=True):
    """What torch can compute on besides the CPU.

    Attributes:
        count: CUDA devices.
        sm: the least compute capability among them times ten, or 0.
        reason: why there are none; empty if there are.
    """

    count: int = 0
    sm: int = 0
    reason: str = ""


class Device(msgspec.Struct, frozen=True):
    """The kind of device that a server computes on.

    Attributes:
        type: ``cpu`` or ``cuda``.
        reason: why, in one line.
        sm: the least compute capability times ten; 0 on the CPU.
    """

    type: str
    reason: str
    sm: int = 0


def choose_device(wanted: str, needed: int, found: Accelerators) -> Device:
    """Choose between CUDA and the CPU.

    Args:
        wanted: ``auto``, ``cpu`` or ``cuda``.
        needed: how many devices the ranks take.
        found: what there is.

    Raises:
        LaunchError: CUDA was asked for and there are too few devices, or none.
    """
    if wanted == "cpu":
        return Device("cpu", "asked for")
    if found.count == 0:
        if wanted == "cuda":
            raise LaunchError(f"no CUDA device can be used: {found.reason}", "Leave --device out to use the CPU.")
        return Device("cpu", f"auto: {found.reason}")
    if found.count < needed:
        raise LaunchError(
            f"the ranks need {needed} CUDA devices and there are {found.count}",
            "Lower --tp, --base-device or --device-step; --device-step 0 puts all ranks on one device.",
        )
    reason = f"{found.count} CUDA device{'s' if found.count > 1 else ''}, sm {found.sm}"
    return Device("cuda", reason if wanted == "cuda" else f"auto: {reason}", found.sm)


def find_accelerators() -> Accelerators:
    """Look for CUDA devices that torch can use; a child process asks the driver, where there is one."""
    if not any(path.exists() for path in DRIVER):
        return Accelerators(reason="no NVIDIA driver")
    if not _torch_has_cuda():
        return Accelerators(reason="this torch is built without CUDA")
    command = [sys.executable, "-P", "-c", PROBE]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=True, text=True)
    except subprocess.TimeoutExpired:
        return Accelerators(reason=f"the driver did not answer within {PROBE_SECONDS:g} s")
    except subprocess.CalledProcessError as error:
        return Accelerators(reason=str(error.stderr).strip().splitlines()[-1])
    found = json.loads(answer.stdout.splitlines()[-1])
    return Accelerators(len(found), min(found, default=0), "" if found else "the driver sees no CUDA device")


def _torch_has_cuda() -> bool:
    """Read it from torch's version file: importing torch takes seconds."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda.*= *['\"]", version, re.MULTILINE) is not None
