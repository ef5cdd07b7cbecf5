"""What tpserve reads of this package; it imports no pynng."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tpserve.api import Options, TransportCapabilities, TransportSpec, hookimpl

TPSERVE_API = 1

Frames = Annotated[int, Meta(ge=1, le=8192)]


class NngOptions(Options, frozen=True, kw_only=True):
    """How much may be under way on a link.

    Attributes:
        send_buffer: frames that wait at the sender; a full buffer blocks it.
        recv_buffer: frames that wait at the receiver.
    """

    send_buffer: Frames = 128
    recv_buffer: Frames = 128


@hookimpl
def tpserve_transports() -> list[TransportSpec]:
    """NNG."""
    return [
        TransportSpec(
            name="nng",
            summary="NNG sockets: fan-out and pipes, on one host",
            factory="tpserve_transport_nng.transport:NngTransport",
            options=NngOptions,
            requires=("pynng>=0.9",),
            capabilities=TransportCapabilities(fanout=True, pipes=True, multi_process=True, multi_node=False),
        )
    ]
