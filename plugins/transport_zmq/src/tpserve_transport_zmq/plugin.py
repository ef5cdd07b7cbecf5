"""What tpserve reads of this package; it imports no zmq."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tpserve.api import Options, TransportCapabilities, TransportSpec, hookimpl

TPSERVE_API = 1

Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]


class ZmqOptions(Options, frozen=True, kw_only=True):
    """How much may be under way on a link.

    Attributes:
        send_buffer: bytes that a sender may be ahead of each receiver before it blocks.
        batch: frames sent together are packed into messages of up to this many bytes.
        io_threads: ZeroMQ's threads in each process.
        spin: microseconds that a follower looks for frames before it sleeps, as long as those before came as soon; it
            lets others have the core in between.
        linger: seconds that closing waits until what was sent has gone out.
    """

    send_buffer: Bytes = 64 << 20
    batch: Bytes = 256 << 10
    io_threads: Annotated[int, Meta(ge=1, le=64)] = 1
    spin: Annotated[int, Meta(ge=0, le=10_000)] = 200
    linger: Annotated[float, Meta(ge=0, le=3600)] = 5.0


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
            capabilities=TransportCapabilities(
                fanout=True, pipes=True, multi_process=True, schemes=("ipc", "tcp", "tcp6")
            ),
        )
    ]
