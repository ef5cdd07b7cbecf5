"""What can be set about the built-in synchronisations; imports nothing large."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tpserve.api import Options

__all__ = ["ShmOptions"]


class ShmOptions(Options, frozen=True, kw_only=True):
    """How a follower waits.

    Attributes:
        spin: microseconds that a follower looks for an announcement before it sleeps, as long as the one before came
            within that time; never where it and the leader have one core together.
    """

    spin: Annotated[int, Meta(ge=0, le=10_000)] = 300
