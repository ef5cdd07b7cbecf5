"""What tpserve reads of this package; it imports no rpyc."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tpserve.api import Options, TransportCapabilities, TransportSpec, hookimpl

TPSERVE_API = 1


Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]


class RpcOptions(Options, frozen=True, kw_only=True):
    """How the calls are made.

    Attributes:
        send_buffer: bytes that may wait at each follower, beside the calls under way, before the leader blocks.
        calls: calls that may be under way to each follower before the leader waits for a reply; 1 makes it wait for the
            last before it makes the next.
        batch: frames sent together travel as calls with up to this many bytes.
        compress: have zlib compress calls of more than 3,000 bytes, as RPyC does by default.
        linger: seconds that closing waits until followers have taken what was sent.
    """

    send_buffer: Bytes = 64 << 20
    calls: Annotated[int, Meta(ge=1, le=64)] = 16
    batch: Bytes = 256 << 10
    compress: bool = False
    linger: Annotated[float, Meta(ge=0, le=3600)] = 5.0


@hookimpl
def tpserve_transports() -> list[TransportSpec]:
    """Remote calls."""
    return [
        TransportSpec(
            name="rpc",
            summary="a remote call per follower and batch, over RPyC: a fan-out, on one host",
            factory="tpserve_transport_rpc.transport:RpcTransport",
            options=RpcOptions,
            requires=("rpyc>=6",),
            capabilities=TransportCapabilities(
                fanout=True, pipes=False, multi_process=True, schemes=("ipc", "tcp", "tcp6")
            ),
        )
    ]
