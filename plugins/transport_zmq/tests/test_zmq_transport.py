"""The zmq transport keeps the contract."""

import pytest

from tpserve.api import TransportSpec
from tpserve.api.addresses import ipc_path
from tpserve.testing.lab import Lab
from tpserve.testing.transport import TransportContract
from tpserve_transport_zmq import sockets
from tpserve_transport_zmq.plugin import tpserve_transports


class TestZmq(TransportContract):
    @pytest.fixture
    def spec(self) -> TransportSpec:
        return tpserve_transports()[0]

    def test_the_file_goes_before_its_socket(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """Afterwards another leader may have one there."""
        address = lab.address()
        leader = lab.transport().fanout_sender(address, 1)
        left = []
        close = sockets.Socket.close

        def look_and_close(end: sockets.Socket, linger: float) -> None:
            left.append(ipc_path(address).exists())
            close(end, linger)

        monkeypatch.setattr(sockets.Socket, "close", look_and_close)
        leader.close()
        assert left == [False]
