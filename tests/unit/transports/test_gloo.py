import signal
import time

import pytest

from tpserve.api import Closed, FanoutReceiver, FanoutSender, PeerLost, Transport, TransportError, TransportSpec
from tpserve.plugins.builtin import tpserve_transports
from tpserve.testing.lab import Lab, Task, soon
from tpserve.testing.links import fan_out
from tpserve.testing.streams import send_until_error
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

    def test_who_joined_and_has_gone_is_missed_while_another_is_awaited(self, lab: Lab) -> None:
        transport = lab.transport()
        leader, first, second = _ends(transport, lab.address(), 2)
        leading, *joining = (Task(end.connect, soon()) for end in (leader, first))
        time.sleep(0.5)
        assert not leading.is_done
        first.close()
        with pytest.raises(PeerLost, match="follower 0 of"):
            leading.result(5)
        leader.close()
        with pytest.raises(Closed):
            joining[0].result(5)

        leader, first, second = _ends(transport, lab.address(), 2)
        joining = [Task(end.connect, soon()) for end in (first, second)]
        time.sleep(0.5)
        leader.close()
        for task in joining:
            with pytest.raises(PeerLost, match="the leader at"):
                task.result(5)

    def test_a_follower_says_who_has_gone(self, lab: Lab) -> None:
        """The follower by whose way broadcasts come, or the leader."""
        _leader, first, _second, third = fan_out(lab, 3)
        reading = Task(third.recv_many, 1, soon())
        first.close()
        with pytest.raises(PeerLost, match=r"^follower 0 of \S+ has gone$"):
            reading.result(5)
        leader, follower = fan_out(lab, 1)
        reading = Task(follower.recv_many, 1, soon())
        leader.close()
        with pytest.raises(PeerLost, match=r"^the leader at \S+ has gone$"):
            reading.result(5)

    def test_closing_ends_joining_and_a_send_that_waits(self, lab: Lab, processes: None) -> None:
        leader, follower = _ends(lab.transport(), lab.address(), 1)
        for end in (leader, follower):
            joining = Task(end.connect, soon())
            time.sleep(0.3)
            assert not joining.is_done
            end.close()
            with pytest.raises(Closed):
                joining.result(5)

        address = lab.address()
        child = lab.child("follow", address=address, follower=0, followers=1)
        leader = lab.transport().fanout_sender(address, 1)
        leader.connect(soon())
        child.ready()
        child.send(signal.SIGSTOP)
        sending = Task(send_until_error, lambda frame: leader.send_many([frame], soon()))
        time.sleep(1)
        leader.close()
        with pytest.raises(Closed):
            sending.result(5)

    def test_other_addresses_than_paths_are_refused(self, lab: Lab) -> None:
        with pytest.raises(TransportError, match="expected ipc:///path"):
            lab.transport().fanout_sender("tcp://127.0.0.1:1", 1)


def _ends(transport: Transport, address: str, followers: int) -> list[FanoutSender | FanoutReceiver]:
    ends: list[FanoutSender | FanoutReceiver] = [transport.fanout_sender(address, followers)]
    return ends + [transport.fanout_receiver(address, number, followers) for number in range(followers)]
