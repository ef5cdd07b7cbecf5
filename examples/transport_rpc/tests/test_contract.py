"""The package is in order, and the transport keeps the contract, also with the calls that the first servers made."""

import pytest

from tpserve.api import Options, TransportSpec
from tpserve.testing.package import PackageContract
from tpserve.testing.transport import TransportContract
from tpserve_transport_rpc.plugin import RpcOptions, tpserve_transports


class TestPackage(PackageContract):
    plugin = "transport.rpc"


class TestRpc(TransportContract):
    @pytest.fixture
    def spec(self) -> TransportSpec:
        return tpserve_transports()[0]


class TestRpcOneCallAtATime(TestRpc):
    @pytest.fixture
    def options(self, spec: TransportSpec) -> Options:
        return RpcOptions(calls=1, compress=True)
