"""What tpserve reads of this package; it imports no zmq."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tpserve.api import Options, TransportCapabilities, TransportSpec, hookimpl

TPSERVE_API = 1

Frames = Annotated[int, Meta(ge=1, le=1_000_000)]


class ZmqOptions(Options, frozen=True, kw_only=True):
    """How much may be under way on a link.

    Attributes:
        send_buffer: frames that wait at the sender; a full buffer blocks it.
        recv_buffer: frames that wait at the receiver.
    """

    send_buffer: Frames = 8192
    recv_buffer: Frames = 8192


@hookimpl
def tpserve_transports() -> list[TransportSpec]:
    """ZeroMQ."""
    return [
        TransportSpec(
            name="zmq",
            summary="ZeroMQ sockets: fan-out and pipes, on one host",
            factory="tpserve_transport_zmq.transport:ZmqTransport",
            options=ZmqOptions,
            requires=("pyzmq>=26",),
            capabilities=TransportCapabilities(fanout=True, pipes=True, multi_process=True, multi_node=False),
        )
    ]
