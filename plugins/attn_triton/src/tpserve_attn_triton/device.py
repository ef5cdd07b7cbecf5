"""What launches depend on: the device, and sizes that kernels are compiled for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Device", "device_of", "power_of_two"]


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of one.

    Attributes:
        processors: multiprocessors.
        overlap: a kernel may be launched while the one before still runs.
        tiles: ``wide`` finds its copy engine and room, and was measured.
    """

    processors: int
    overlap: bool
    tiles: bool

    def options(self, *, after_ours: bool = True) -> dict[str, Any]:
        """For a launch; ``after_ours`` that of a kernel which says when the next may be launched.

        cuBLAS's do not, and who waits for one that way begins half a microsecond later than who does not.
        """
        return {"launch_pdl": True} if self.overlap and after_ours else {}


@functools.cache
def device_of(device: torch.device) -> Device:
    """Look a device up; what is none of CUDA's interprets kernels."""
    if device.type != "cuda":
        return Device(4, overlap=False, tiles=True)
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.multi_processor_count, overlap=properties.major >= 9, tiles=properties.major == 9)


def power_of_two(least: int) -> int:
    """The first that is no less."""
    return 1 << (least - 1).bit_length()
