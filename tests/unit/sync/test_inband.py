import msgspec
import pytest

from tpserve.api import SyncSpec, TransportSpec
from tpserve.plugins.builtin import tpserve_syncs
from tpserve.testing.sync import SyncContract
from tpserve_transport_zmq.plugin import ZmqOptions, tpserve_transports


class LittleRoom(ZmqOptions, frozen=True, kw_only=True):
    """Few announcements fit into the fan-out, so that a leader is soon too far ahead."""

    send_buffer: int = 100_000


class TestInband(SyncContract):
    @pytest.fixture
    def spec(self) -> SyncSpec:
        return next(spec for spec in tpserve_syncs() if spec.name == "inband")

    @pytest.fixture
    def transport(self) -> TransportSpec:
        (zmq,) = tpserve_transports()
        return msgspec.structs.replace(zmq, options=LittleRoom)
