import pytest

from tpserve.api import TransportError, TransportSpec
from tpserve.plugins.builtin import tpserve_transports
from tpserve.testing.lab import Lab
from tpserve.testing.transport import TransportContract


class TestGloo(TransportContract):
    @pytest.fixture
    def spec(self) -> TransportSpec:
        return next(spec for spec in tpserve_transports() if spec.name == "gloo")

    def test_other_addresses_than_paths_are_refused(self, lab: Lab) -> None:
        with pytest.raises(TransportError, match="expected ipc:///path"):
            lab.transport().fanout_sender("tcp://127.0.0.1:1", 1)
