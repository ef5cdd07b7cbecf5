"""What this fan-out does beyond the contract."""

import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tpserve.api import DeadlineExceeded, FrameError, PeerLost, TransportError
from tpserve.api.doors import dial
from tpserve.testing.lab import Task
from tpserve_transport_shm.fanout import CROWD
from tpserve_transport_shm.plugin import ShmOptions
from tpserve_transport_shm.transport import ShmTransport


@pytest.mark.usefixtures("tpserve_guard")
def test_a_frame_sent_in_part_is_the_last(tmp_path: Path) -> None:
    address, soon = f"ipc://{tmp_path}/x", time.monotonic() + 30
    transport = ShmTransport(ShmOptions(send_buffer=1 << 16))
    leader, follower = transport.fanout_sender(address, 1), transport.fanout_receiver(address, 0, 1)
    joining = threading.Thread(target=follower.connect, args=(soon,))
    joining.start()
    leader.connect(soon)
    joining.join()
    assert list(tmp_path.iterdir()) == []

    leader.send_many([b"whole"], soon)
    with pytest.raises(DeadlineExceeded, match=r"follower 0 of .* is 65536 bytes behind"):
        leader.send_many([bytes(1 << 20)], time.monotonic() + 0.1)
    with pytest.raises(TransportError, match="can only be closed"):
        leader.send_many([b"more"], soon)
    leader.close()

    assert follower.recv_many(1, soon) == [b"whole"]
    with pytest.raises(PeerLost):
        follower.recv_many(1, soon)
    transport.close()


@pytest.mark.usefixtures("tpserve_guard")
def test_two_followers_with_one_number_are_an_error(tmp_path: Path) -> None:
    address, soon = f"ipc://{tmp_path}/x", time.monotonic() + 30
    transport = ShmTransport(ShmOptions())
    leader = transport.fanout_sender(address, 2)
    followers = [transport.fanout_receiver(address, 0, 2) for _ in range(2)]
    joining = [threading.Thread(target=_refused, args=(follower.connect, soon)) for follower in followers]
    for thread in joining:
        thread.start()
    with pytest.raises(FrameError, match="a second follower 0 came to"):
        leader.connect(soon)
    transport.close()
    for thread in joining:
        thread.join()


@pytest.mark.usefixtures("tpserve_guard")
def test_the_file_goes_before_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards another leader may have one there."""
    transport = ShmTransport(ShmOptions())
    leader = transport.fanout_sender(f"ipc://{tmp_path}/x", 1)
    left: list[bool] = []
    close = socket.socket.close

    def look_and_close(end: socket.socket) -> None:
        left.append((tmp_path / "x").exists())
        close(end)

    monkeypatch.setattr(socket.socket, "close", look_and_close)
    leader.close()
    monkeypatch.undo()
    assert left
    assert not any(left)
    transport.close()


@pytest.mark.usefixtures("tpserve_guard")
def test_a_stranger_is_turned_away(tmp_path: Path) -> None:
    transport = ShmTransport(ShmOptions())
    leader = transport.fanout_sender(f"ipc://{tmp_path}/x", 1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "x"))
        stranger.sendall(b"what is this")
        with pytest.raises(DeadlineExceeded, match="somebody who said b'what"):
            leader.connect(time.monotonic() + 0.3)
        joining = Task(transport.fanout_receiver(f"ipc://{tmp_path}/x", 0, 1).connect, time.monotonic() + 30)
        leader.connect(time.monotonic() + 30)
        joining.result()
        assert stranger.recv(1) == b""
    transport.close()


@pytest.mark.usefixtures("tpserve_guard")
def test_of_a_silent_crowd_only_so_many_are_kept(tmp_path: Path) -> None:
    """Otherwise it would take all descriptors that the process may have."""
    transport = ShmTransport(ShmOptions())
    leader = transport.fanout_sender(f"ipc://{tmp_path}/x", 1)
    leading = Task(leader.connect, time.monotonic() + 30)
    with ExitStack() as crowd:
        guests = []
        for _ in range(2 * CROWD + 1):
            guest = crowd.enter_context(socket.socket(socket.AF_UNIX))
            while not dial(guest, tmp_path / "x"):
                time.sleep(0.01)
            guests.append(guest)
        joining = Task(transport.fanout_receiver(f"ipc://{tmp_path}/x", 0, 1).connect, time.monotonic() + 30)
        is_there = [_is_kept(guest) for guest in guests] if not leading.is_done else []
        leading.result()
        joining.result()
        assert is_there == sorted(is_there)
        assert sum(is_there) <= CROWD + 2  # and who waits at the door
    transport.close()


def _is_kept(guest: socket.socket) -> bool:
    guest.setblocking(False)
    try:
        return guest.recv(1) != b""
    except BlockingIOError:
        return True


def _refused(connect: object, deadline: float) -> None:
    assert callable(connect)
    with pytest.raises(TransportError):
        connect(deadline)
