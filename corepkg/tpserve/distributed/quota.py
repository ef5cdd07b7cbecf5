"""How much of this machine's cores a container may use."""

from __future__ import annotations

import math
from pathlib import Path

__all__ = ["quota"]

CGROUP = Path("/sys/fs/cgroup")


def quota() -> float:
    """How many cores' time the container may use, one at least; infinite without a limit."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return max(1.0, int(quota) / int(period))
    except (OSError, ValueError):  # no version 2 control group, or "max"
        return math.inf
