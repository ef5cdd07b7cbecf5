import pytest

from tpserve.api import SyncSpec, TransportSpec
from tpserve.plugins.builtin import tpserve_syncs
from tpserve.testing.sync import SyncContract, fanout_between_processes


class TestInband(SyncContract):
    @pytest.fixture
    def spec(self) -> SyncSpec:
        return next(spec for spec in tpserve_syncs() if spec.name == "inband")

    @pytest.fixture
    def transport(self) -> TransportSpec:
        return fanout_between_processes()
