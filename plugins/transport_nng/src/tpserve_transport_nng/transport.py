"""The transport: the ends made in this process."""

from __future__ import annotations

from tpserve.api import FanoutReceiver, FanoutSender, Options, PipeReceiver, PipeSender, Transport
from tpserve.api.addresses import check_follower
from tpserve.api.ends import Ends
from tpserve_transport_nng.fanout import NngFanoutReceiver, NngFanoutSender
from tpserve_transport_nng.pipe import NngPipeReceiver, NngPipeSender
from tpserve_transport_nng.plugin import NngOptions

__all__ = ["NngTransport"]


class NngTransport(Transport):
    """Makes nng ends in this process, which must not have been forked after pynng was imported."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        assert isinstance(options, NngOptions)
        self._options = options
        self._ends = Ends()

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Listen for each follower."""
        return self._ends.add(lambda: NngFanoutSender(self._options, address, followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Make a follower's end."""
        check_follower(address, follower, followers)
        return self._ends.add(lambda: NngFanoutReceiver(address, follower, followers))

    def pipe_receiver(self, address: str) -> PipeReceiver:
        """Listen for senders."""
        return self._ends.add(lambda: NngPipeReceiver(address))

    def pipe_sender(self, address: str) -> PipeSender:
        """Make a sending end."""
        return self._ends.add(lambda: NngPipeSender(self._options, address))

    def close(self) -> None:
        """Close all ends; those that send wait until what they sent has gone out."""
        self._ends.close()
