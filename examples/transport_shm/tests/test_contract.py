"""The package is in order, and the transport keeps the contract, with the memory that it has and with very little."""

import pytest

from tpserve.api import Options, TransportSpec
from tpserve.testing.package import PackageContract
from tpserve.testing.transport import TransportContract
from tpserve_transport_shm.plugin import ShmOptions, tpserve_transports


class TestPackage(PackageContract):
    plugin = "transport.shm"


class TestShm(TransportContract):
    @pytest.fixture
    def spec(self) -> TransportSpec:
        return tpserve_transports()[0]


class TestShmInLittleMemory(TestShm):
    """Frames go round the ring many times, and the leader waits."""

    @pytest.fixture
    def options(self, spec: TransportSpec) -> Options:
        return ShmOptions(send_buffer=2 << 20, spin=0)
