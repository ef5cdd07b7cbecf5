import pytest

from tpserve.api import SyncSpec
from tpserve.plugins.builtin import tpserve_syncs
from tpserve.testing.sync import SyncContract


class TestGloo(SyncContract):
    @pytest.fixture
    def spec(self) -> SyncSpec:
        return tpserve_syncs()[0]
