"""What can be set about the built-in comms; imports nothing large."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tpserve.api import Options

__all__ = ["PeerCommOptions", "ShmCommOptions"]


class ShmCommOptions(Options, frozen=True, kw_only=True):
    """How ranks wait for each other.

    Attributes:
        spin: microseconds that a rank looks for another's part before it sleeps; never with more ranks than the
            cores that they may use.
    """

    spin: Annotated[int, Meta(ge=0, le=100_000)] = 1000


class PeerCommOptions(Options, frozen=True, kw_only=True):
    """Which sums are small.

    Attributes:
        largest: bytes of the largest sum of two ranks that NCCL does not take; of N ranks, the (N-1)²th part. A GPU
            keeps six times as much memory for it, and less for more ranks.
    """

    largest: Annotated[int, Meta(ge=0, le=1 << 28)] = 16 << 20
