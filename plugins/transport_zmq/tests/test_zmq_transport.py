"""The zmq transport keeps the contract."""

import pytest

from tpserve.api import TransportSpec
from tpserve.testing.transport import TransportContract
from tpserve_transport_zmq.plugin import tpserve_transports


class TestZmq(TransportContract):
    @pytest.fixture
    def spec(self) -> TransportSpec:
        return tpserve_transports()[0]
