"""The transport: the ends made in this process."""

from __future__ import annotations

from tpserve.api import FanoutReceiver, FanoutSender, Options, Transport
from tpserve.api.addresses import check_follower
from tpserve.api.ends import Ends
from tpserve_transport_rpc.fanout import RpcFanoutReceiver, RpcFanoutSender
from tpserve_transport_rpc.plugin import RpcOptions

__all__ = ["RpcTransport"]


class RpcTransport(Transport):
    """Makes the ends of fan-outs whose ranks are all on one host."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        assert isinstance(options, RpcOptions)
        self._options = options
        self._ends = Ends()

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Make the leader's end, where followers can come from now on."""
        return self._ends.add(lambda: RpcFanoutSender(self._options, address, followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Make a follower's end."""
        check_follower(address, follower, followers)
        return self._ends.add(lambda: RpcFanoutReceiver(self._options, address, follower))

    def close(self) -> None:
        """Close every end made here."""
        self._ends.close()
