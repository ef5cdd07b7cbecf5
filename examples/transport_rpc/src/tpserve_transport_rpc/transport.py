"""The transport: the ends made in this process."""

from __future__ import annotations

from typing import TypeVar

from tpserve.api import FanoutReceiver, FanoutSender, Options, Transport
from tpserve_transport_rpc.fanout import RpcFanoutReceiver, RpcFanoutSender
from tpserve_transport_rpc.plugin import RpcOptions

__all__ = ["RpcTransport"]

End = TypeVar("End", FanoutSender, FanoutReceiver)


class RpcTransport(Transport):
    """Makes the ends of fan-outs whose ranks are all on one host."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        assert isinstance(options, RpcOptions)
        self._options = options
        self._ends: list[FanoutSender | FanoutReceiver] = []

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Make the leader's end, where followers can come from now on."""
        return self._keep(RpcFanoutSender(self._options, address, followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Make a follower's end."""
        return self._keep(RpcFanoutReceiver(self._options, address, follower))

    def close(self) -> None:
        """Close every end made here."""
        for end in self._ends:
            end.close()
        self._ends.clear()

    def _keep(self, end: End) -> End:
        self._ends.append(end)
        return end
