import gc
import sys
import time

import pytest

from tpserve.api import Closed, NoOptions, PeerLost, TransportSpec
from tpserve.plugins.builtin import tpserve_transports
from tpserve.testing.lab import Task, soon
from tpserve.testing.processes import numbered
from tpserve.testing.transport import TransportContract
from tpserve.transports.inproc import InprocTransport


class TestInproc(TransportContract):
    @pytest.fixture
    def spec(self) -> TransportSpec:
        return tpserve_transports()[0]


def test_closed_ends_keep_no_frames_and_no_addresses() -> None:
    transport, frame = InprocTransport(NoOptions()), numbered(0)
    held = sys.getrefcount(frame)
    for number in range(6):
        _leave_unread(transport, f"ipc:///{number}", frame, leader_first=number % 2 == 0)
    gc.collect()  # errors are in cycles with what was called
    assert sys.getrefcount(frame) == held
    assert len(transport._queues) == 1
    transport.close()


def _leave_unread(transport: InprocTransport, address: str, frame: bytes, leader_first: bool) -> None:
    """Close both ends of a link with frames that wait, and with some that a call has taken which waits for more."""
    leader, follower = transport.fanout_sender(address, 1), transport.fanout_receiver(address, 0, 1)
    joining = Task(follower.connect, soon())
    leader.connect(soon())
    joining.result()
    leader.send_many([frame] * 3, soon())
    waiting = Task(follower.recv_many, 4, soon())
    time.sleep(0.05)
    if leader_first:
        leader.close()
    follower.close()
    with pytest.raises((Closed, PeerLost)):
        waiting.result()
    leader.close()
