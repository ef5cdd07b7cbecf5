"""The transport: one zmq context, and the ends made with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import zmq

from tpserve.api import Closed, FanoutReceiver, FanoutSender, Options, PipeReceiver, PipeSender, Transport
from tpserve.api.addresses import check_follower
from tpserve_transport_zmq.fanout import ZmqFanoutReceiver, ZmqFanoutSender
from tpserve_transport_zmq.pipe import ZmqPipeReceiver, ZmqPipeSender
from tpserve_transport_zmq.plugin import ZmqOptions

__all__ = ["ZmqTransport"]

End = TypeVar("End", FanoutSender, FanoutReceiver, PipeSender, PipeReceiver)


class ZmqTransport(Transport):
    """Makes zmq ends in this process."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        assert isinstance(options, ZmqOptions)
        self._options = options
        self._context = zmq.Context(io_threads=options.io_threads)
        self._ends: list[FanoutSender | FanoutReceiver | PipeSender | PipeReceiver] = []
        self._closed = False

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Bind the leader's end."""
        return self._make(lambda: ZmqFanoutSender(self._context, self._options, address, followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Begin to connect a follower's end."""
        check_follower(address, follower, followers)
        return self._make(lambda: ZmqFanoutReceiver(self._context, self._options, address, follower))

    def pipe_receiver(self, address: str) -> PipeReceiver:
        """Bind a receiving end."""
        return self._make(lambda: ZmqPipeReceiver(self._context, address))

    def pipe_sender(self, address: str) -> PipeSender:
        """Begin to connect a sending end."""
        return self._make(lambda: ZmqPipeSender(self._context, self._options, address))

    def close(self) -> None:
        """Close all ends, wait until what they sent has gone out, and end the context."""
        self._closed = True
        for end in self._ends:
            end.close()
        self._ends.clear()
        self._context.term()

    def _make(self, make: Callable[[], End]) -> End:
        if self._closed:
            raise Closed("the transport was closed")
        end = make()
        self._ends.append(end)
        return end
