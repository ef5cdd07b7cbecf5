"""The transport: one zmq context, and the ends made with it."""

from __future__ import annotations

from typing import TypeVar

import zmq

from tpserve.api import FanoutReceiver, FanoutSender, Options, PipeReceiver, PipeSender, Transport
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

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Bind the leader's end."""
        return self._keep(ZmqFanoutSender(self._context, self._options, address, followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Begin to connect a follower's end."""
        return self._keep(ZmqFanoutReceiver(self._context, self._options, address, follower))

    def pipe_receiver(self, address: str) -> PipeReceiver:
        """Bind a receiving end."""
        return self._keep(ZmqPipeReceiver(self._context, address))

    def pipe_sender(self, address: str) -> PipeSender:
        """Begin to connect a sending end."""
        return self._keep(ZmqPipeSender(self._context, self._options, address))

    def close(self) -> None:
        """Close all ends, wait until what they sent has gone out, and end the context."""
        for end in self._ends:
            end.close()
        self._ends.clear()
        self._context.term()

    def _keep(self, end: End) -> End:
        self._ends.append(end)
        return end
