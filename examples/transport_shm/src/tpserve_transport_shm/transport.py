"""The transport: the ends made in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from tpserve.api import FanoutReceiver, FanoutSender, Options, Transport, TransportError
from tpserve_transport_shm.fanout import ShmFanoutReceiver, ShmFanoutSender
from tpserve_transport_shm.plugin import ShmOptions

__all__ = ["ShmTransport"]

End = TypeVar("End", FanoutSender, FanoutReceiver)


class ShmTransport(Transport):
    """Makes the ends of fan-outs whose ranks are all on one host."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        assert isinstance(options, ShmOptions)
        self._options = options
        self._ends: list[FanoutSender | FanoutReceiver] = []

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Make the leader's end, where followers can come from now on."""
        return self._keep(ShmFanoutSender(self._options, _path(address), followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Make a follower's end."""
        return self._keep(ShmFanoutReceiver(self._options, _path(address), follower, followers))

    def close(self) -> None:
        """Close every end made here."""
        for end in self._ends:
            end.close()
        self._ends.clear()

    def _keep(self, end: End) -> End:
        self._ends.append(end)
        return end


def _path(address: str) -> Path:
    if not address.startswith("ipc://"):
        raise TransportError(f"cannot use {address}: memory is shared on one host, by ipc addresses")
    return Path(address.removeprefix("ipc://"))
