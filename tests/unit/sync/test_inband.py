import msgspec
import pytest

from tpserve.api import SyncSpec, TransportSpec
from tpserve.plugins.builtin import tpserve_syncs, tpserve_transports
from tpserve.testing.sync import SyncContract
from tpserve.transports.options import GlooOptions


class LittleRoom(GlooOptions, frozen=True, kw_only=True):
    """Few announcements fit into the fan-out, so that a leader is soon too far ahead."""

    send_buffer: int = 100_000


class TestInband(SyncContract):
    @pytest.fixture
    def spec(self) -> SyncSpec:
        return next(spec for spec in tpserve_syncs() if spec.name == "inband")

    @pytest.fixture
    def transport(self) -> TransportSpec:
        gloo = next(spec for spec in tpserve_transports() if spec.name == "gloo")
        return msgspec.structs.replace(gloo, options=LittleRoom)
