"""The transport: the ends made in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tpserve.api import Closed, FanoutReceiver, FanoutSender, Options, PipeReceiver, PipeSender, Transport
from tpserve.api.addresses import check_follower
from tpserve_transport_nng.fanout import NngFanoutReceiver, NngFanoutSender
from tpserve_transport_nng.pipe import NngPipeReceiver, NngPipeSender
from tpserve_transport_nng.plugin import NngOptions

__all__ = ["NngTransport"]

End = TypeVar("End", FanoutSender, FanoutReceiver, PipeSender, PipeReceiver)


class NngTransport(Transport):
    """Makes nng ends in this process, which must not have been forked after pynng was imported."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        assert isinstance(options, NngOptions)
        self._options = options
        self._ends: list[FanoutSender | FanoutReceiver | PipeSender | PipeReceiver] = []
        self._closed = False

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Listen for each follower."""
        return self._make(lambda: NngFanoutSender(self._options, address, followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Begin to dial a follower's end."""
        check_follower(address, follower, followers)
        return self._make(lambda: NngFanoutReceiver(address, follower))

    def pipe_receiver(self, address: str) -> PipeReceiver:
        """Listen for senders."""
        return self._make(lambda: NngPipeReceiver(address))

    def pipe_sender(self, address: str) -> PipeSender:
        """Begin to dial a sending end."""
        return self._make(lambda: NngPipeSender(self._options, address))

    def close(self) -> None:
        """Close all ends; those that send wait until what they sent has gone out."""
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
