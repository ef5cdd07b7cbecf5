"""What can be set about the built-in transports; imports nothing large."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tpserve.api import Options

__all__ = ["GlooOptions"]

Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]


class GlooOptions(Options, frozen=True, kw_only=True):
    """How much may be under way.

    Attributes:
        send_buffer: bytes that the leader may be ahead of the slowest follower before it blocks.
        batch: frames sent together are packed into broadcasts of up to this many bytes.
        linger: seconds that closing waits until what was sent has gone out.
    """

    send_buffer: Bytes = 64 << 20
    batch: Bytes = 256 << 10
    linger: Annotated[float, Meta(ge=0, le=3600)] = 5.0
