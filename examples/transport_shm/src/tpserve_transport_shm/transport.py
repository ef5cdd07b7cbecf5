"""The transport: the ends made in this process."""

from __future__ import annotations

from tpserve.api import FanoutReceiver, FanoutSender, Options, Transport
from tpserve.api.addresses import check_follower, ipc_path
from tpserve.api.ends import Ends
from tpserve_transport_shm.fanout import ShmFanoutReceiver, ShmFanoutSender
from tpserve_transport_shm.plugin import ShmOptions

__all__ = ["ShmTransport"]


class ShmTransport(Transport):
    """Makes the ends of fan-outs whose ranks are all on one host."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        assert isinstance(options, ShmOptions)
        self._options = options
        self._ends = Ends()

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Make the leader's end, where followers can come from now on."""
        return self._ends.add(lambda: ShmFanoutSender(self._options, ipc_path(address), followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Make a follower's end."""
        check_follower(address, follower, followers)
        return self._ends.add(lambda: ShmFanoutReceiver(self._options, ipc_path(address), follower, followers))

    def close(self) -> None:
        """Close every end made here."""
        self._ends.close()
