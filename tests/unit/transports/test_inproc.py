import pytest

from tpserve.api import TransportSpec
from tpserve.plugins.builtin import tpserve_transports
from tpserve.testing.transport import TransportContract


class TestInproc(TransportContract):
    @pytest.fixture
    def spec(self) -> TransportSpec:
        return tpserve_transports()[0]
