"""The transport: one zmq context, and the ends made with it."""

from __future__ import annotations

import zmq

from tpserve.api import FanoutReceiver, FanoutSender, Options, PipeReceiver, PipeSender, Transport
from tpserve.api.addresses import check_follower
from tpserve.api.ends import Ends
from tpserve_transport_zmq.doorkeeper import Context, Doorkeeper
from tpserve_transport_zmq.fanout import ZmqFanoutReceiver, ZmqFanoutSender
from tpserve_transport_zmq.pipe import ZmqPipeReceiver, ZmqPipeSender
from tpserve_transport_zmq.plugin import ZmqOptions

__all__ = ["ZmqTransport"]


class ZmqTransport(Transport):
    """Makes zmq ends in this process."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        assert isinstance(options, ZmqOptions)
        self._options = options
        self._context: Context = zmq.Context(io_threads=options.io_threads)
        self._doorkeeper: Doorkeeper | None = None
        self._ends = Ends()

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Bind the leader's end."""
        return self._ends.add(lambda: ZmqFanoutSender(self._guarded(), self._options, address, followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Begin to connect a follower's end."""
        check_follower(address, follower, followers)
        return self._ends.add(lambda: ZmqFanoutReceiver(self._context, self._options, address, follower))

    def pipe_receiver(self, address: str) -> PipeReceiver:
        """Bind a receiving end."""
        return self._ends.add(lambda: ZmqPipeReceiver(self._guarded(), address))

    def pipe_sender(self, address: str) -> PipeSender:
        """Begin to connect a sending end."""
        return self._ends.add(lambda: ZmqPipeSender(self._context, self._options, address))

    def close(self) -> None:
        """Close all ends, wait until what they sent has gone out, and end the context."""
        self._ends.close()
        self._context.term()
        if self._doorkeeper is not None:
            self._doorkeeper.join()

    def _guarded(self) -> Context:
        """The context, with somebody who answers for sockets that bind."""
        if self._doorkeeper is None:
            self._doorkeeper = Doorkeeper(self._context)
        return self._context
