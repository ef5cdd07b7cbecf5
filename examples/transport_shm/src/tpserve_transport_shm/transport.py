"""The transport: the ends made in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tpserve.api import Closed, FanoutReceiver, FanoutSender, Options, Transport
from tpserve.api.addresses import check_follower, ipc_path
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
        self._closed = False

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Make the leader's end, where followers can come from now on."""
        return self._make(lambda: ShmFanoutSender(self._options, ipc_path(address), followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Make a follower's end."""
        check_follower(address, follower, followers)
        return self._make(lambda: ShmFanoutReceiver(self._options, ipc_path(address), follower, followers))

    def close(self) -> None:
        """Close every end made here."""
        self._closed = True
        for end in self._ends:
            end.close()
        self._ends.clear()

    def _make(self, make: Callable[[], End]) -> End:
        if self._closed:
            raise Closed("the transport was closed")
        end = make()
        self._ends.append(end)
        return end
