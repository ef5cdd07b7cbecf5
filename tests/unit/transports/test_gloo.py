import signal
import time

import pytest

from tpserve.api import PeerLost, TransportError, TransportSpec
from tpserve.plugins.builtin import tpserve_transports
from tpserve.testing.lab import Lab, Task, soon
from tpserve.testing.links import send_until_error
from tpserve.testing.transport import TransportContract


class TestGloo(TransportContract):
    @pytest.fixture
    def spec(self) -> TransportSpec:
        return next(spec for spec in tpserve_transports() if spec.name == "gloo")

    def test_one_follower_that_stands_still_hides_no_other_that_goes(self, lab: Lab, processes: None) -> None:
        """Which is named, and in few words."""
        address = lab.address()
        children = [lab.child("follow", address=address, follower=follower, followers=2) for follower in range(2)]
        leader = lab.transport().fanout_sender(address, 2)
        leader.connect(soon())
        for child in children:
            child.ready()
        children[0].send(signal.SIGSTOP)
        sending = Task(send_until_error, lambda frame: leader.send_many([frame], soon()))
        time.sleep(1)
        children[1].send(signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"^follower 1 of \S+ has gone$"):
            sending.result(5)

    def test_other_addresses_than_paths_are_refused(self, lab: Lab) -> None:
        with pytest.raises(TransportError, match="expected ipc:///path"):
            lab.transport().fanout_sender("tcp://127.0.0.1:1", 1)
