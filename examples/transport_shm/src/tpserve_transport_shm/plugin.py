"""What tpserve reads of this package."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tpserve.api import Options, TransportCapabilities, TransportSpec, hookimpl

TPSERVE_API = 1


class ShmOptions(Options, frozen=True, kw_only=True):
    """The memory, and how a follower waits.

    Attributes:
        send_buffer: bytes of the ring that all ranks share, allocated at once: so far the leader may be ahead of the
            slowest follower before it blocks.
        spin: microseconds that a follower looks for frames before it sleeps, as long as those before came within that
            time; never where it and the leader have one core together.
    """

    send_buffer: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 32 << 20
    spin: Annotated[int, Meta(ge=0, le=10_000)] = 50


@hookimpl
def tpserve_transports() -> list[TransportSpec]:
    """Shared memory."""
    return [
        TransportSpec(
            name="shm",
            summary="a ring in shared memory: a fan-out, on one host",
            factory="tpserve_transport_shm.transport:ShmTransport",
            options=ShmOptions,
            requires=("xxhash>=3.5",),
            probe="tpserve_transport_shm.watch:probe",
            capabilities=TransportCapabilities(fanout=True, pipes=False, multi_process=True, multi_node=False),
        )
    ]
