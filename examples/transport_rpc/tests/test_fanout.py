"""What this fan-out does beyond the contract."""

import socket
import threading
import time
from pathlib import Path

import pytest

from tpserve.api import Closed, DeadlineExceeded, PeerLost
from tpserve.testing.lab import Task
from tpserve_transport_rpc.fanout import GREETING, MAGIC
from tpserve_transport_rpc.plugin import RpcOptions
from tpserve_transport_rpc.transport import RpcTransport


@pytest.mark.usefixtures("tpserve_guard")
def test_closing_ends_a_send_that_waits(tmp_path: Path) -> None:
    address, soon = f"ipc://{tmp_path}/x", time.monotonic() + 30
    transport = RpcTransport(RpcOptions(send_buffer=1 << 16))
    leader, follower = transport.fanout_sender(address, 1), transport.fanout_receiver(address, 0, 1)
    joining = threading.Thread(target=follower.connect, args=(soon,))
    joining.start()
    leader.connect(soon)
    joining.join()
    sending = Task(leader.send_many, [bytes(1 << 16)] * 200, soon)
    time.sleep(0.5)

    begun = time.monotonic()
    leader.close()
    assert time.monotonic() < begun + 2
    with pytest.raises(Closed):
        sending.result()
    transport.close()


@pytest.mark.usefixtures("tpserve_guard")
def test_one_follower_that_does_not_read_hides_no_other_that_goes(tmp_path: Path) -> None:
    address, soon = f"ipc://{tmp_path}/x", time.monotonic() + 30
    transport = RpcTransport(RpcOptions(send_buffer=1 << 16))
    leader = transport.fanout_sender(address, 2)
    followers = [transport.fanout_receiver(address, number, 2) for number in range(2)]
    joining = [Task(follower.connect, soon) for follower in followers]
    leader.connect(soon)
    for task in joining:
        task.result()
    sending = Task(leader.send_many, [bytes(1 << 16)] * 200, soon)
    time.sleep(0.5)
    followers[1].close()
    with pytest.raises(PeerLost, match="follower 1 of"):
        sending.result(5)
    transport.close()


@pytest.mark.usefixtures("tpserve_guard")
def test_a_follower_that_does_not_read_is_named(tmp_path: Path) -> None:
    address, soon = f"ipc://{tmp_path}/x", time.monotonic() + 30
    transport = RpcTransport(RpcOptions(send_buffer=1 << 16, batch=1 << 16))
    leader, follower = transport.fanout_sender(address, 1), transport.fanout_receiver(address, 0, 1)
    joining = Task(follower.connect, soon)
    leader.connect(soon)
    joining.result()
    leader.send_many([bytes(1 << 16)] * 2, soon)
    with pytest.raises(DeadlineExceeded, match=f"^follower 0 of {address} made no room for [0-9]+ bytes$"):
        leader.send_many([bytes(1 << 24)], time.monotonic() + 0.5)
    follower.close()
    transport.close()


@pytest.mark.usefixtures("tpserve_guard")
def test_a_leader_that_closes_leaves_the_next_one_alone(tmp_path: Path) -> None:
    """Though that comes while the first still waits for a call of its own to end."""
    address, soon = f"ipc://{tmp_path}/x", time.monotonic() + 30
    transport = RpcTransport(RpcOptions())
    first = transport.fanout_sender(address, 1)
    with first._lock:
        closing = Task(first.close)
        time.sleep(0.3)
        leader, follower = transport.fanout_sender(address, 1), transport.fanout_receiver(address, 0, 1)
    closing.result()
    joining = Task(follower.connect, soon)
    leader.connect(soon)
    joining.result()
    transport.close()


@pytest.mark.usefixtures("tpserve_guard")
def test_a_stranger_is_turned_away(tmp_path: Path) -> None:
    transport = RpcTransport(RpcOptions())
    leader = transport.fanout_sender(f"ipc://{tmp_path}/x", 1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "x"))
        stranger.sendall(b"nonsense")
        with pytest.raises(DeadlineExceeded, match="somebody who said b'nonsense"):
            leader.connect(time.monotonic() + 0.3)
        joining = Task(transport.fanout_receiver(f"ipc://{tmp_path}/x", 0, 1).connect, time.monotonic() + 30)
        leader.connect(time.monotonic() + 30)
        joining.result()
        assert stranger.recv(1) == b""
    transport.close()


@pytest.mark.usefixtures("tpserve_guard")
def test_a_follower_that_does_not_answer_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    transport = RpcTransport(RpcOptions())
    leader = transport.fanout_sender(f"ipc://{tmp_path}/x", 1)
    with socket.socket(socket.AF_UNIX) as follower:
        follower.connect(str(tmp_path / "x"))
        follower.sendall(GREETING.pack(MAGIC, 0))
        with pytest.raises(DeadlineExceeded, match="follower 0"):
            leader.connect(time.monotonic() + 0.5)
    transport.close()


@pytest.mark.usefixtures("tpserve_guard")
def test_a_follower_that_joined_and_has_gone_is_missed_while_another_is_awaited(tmp_path: Path) -> None:
    transport = RpcTransport(RpcOptions())
    leader = transport.fanout_sender(f"ipc://{tmp_path}/x", 2)
    follower = transport.fanout_receiver(f"ipc://{tmp_path}/x", 0, 2)
    leading, joining = (Task(end.connect, time.monotonic() + 30) for end in (leader, follower))
    time.sleep(0.5)
    assert not leading.is_done
    follower.close()
    with pytest.raises(PeerLost, match="follower 0 of"):
        leading.result(5)
    with pytest.raises(Closed):
        joining.result(5)
    transport.close()


@pytest.mark.usefixtures("tpserve_guard")
def test_a_follower_that_does_not_answer_hides_no_other_that_goes(tmp_path: Path) -> None:
    transport = RpcTransport(RpcOptions())
    leader = transport.fanout_sender(f"ipc://{tmp_path}/x", 2)
    follower = transport.fanout_receiver(f"ipc://{tmp_path}/x", 0, 2)
    leading, joining = (Task(end.connect, time.monotonic() + 30) for end in (leader, follower))
    time.sleep(0.5)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / "x"))
        silent.sendall(GREETING.pack(MAGIC, 1))
        time.sleep(0.3)
        follower.close()
        with pytest.raises(PeerLost, match="follower 0 of"):
            leading.result(5)
    with pytest.raises(Closed):
        joining.result(5)
    transport.close()
