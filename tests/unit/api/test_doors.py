"""Meeting at a socket: nobody waits for strangers, nor for a listener that lets nobody in."""

import socket
import time
from contextlib import closing

import pytest

from tpserve.api import DeadlineExceeded, PeerLost, TransportError
from tpserve.api.doors import CROWD, PATIENCE, dial, greetings
from tpserve.testing.lab import Task


@pytest.fixture
def door(tmp_path):
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "door"))
        yield door


@pytest.fixture
def come(tmp_path):
    guests = []

    def connect(says=b""):
        guests.append(socket.socket(socket.AF_UNIX))
        assert dial(guests[-1], tmp_path / "door")
        guests[-1].sendall(says)
        return guests[-1]

    yield connect
    for guest in guests:
        guest.close()


def late():
    return "nobody came"


def soon():
    return time.monotonic() + 30


def test_dialling_waits_for_nobody(door, tmp_path):
    with socket.socket(socket.AF_UNIX) as end:
        assert not dial(end, tmp_path / "nowhere")
        assert not dial(end, tmp_path / "door")
        door.listen(1)
        assert dial(end, tmp_path / "door")
        assert end.gettimeout() is None
        crowd = [socket.socket(socket.AF_UNIX) for _ in range(8)]
        let_in = [dial(one, tmp_path / "door") for one in crowd]
        assert not all(let_in)
        for one in crowd:
            one.close()


@pytest.mark.parametrize("name", ["long" * 40, "file/below"])
def test_where_nobody_can_listen_is_an_error(tmp_path, name):
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as end, pytest.raises(TransportError, match=name):
        dial(end, tmp_path / name)


def test_who_is_silent_or_leaves_holds_nobody_up(door, come):
    door.listen(8)
    come()
    come().close()
    slow = come(b"sl")
    come(b"quick")
    with closing(greetings(door, 4, soon(), late)) as guests:
        peer, said = next(guests)
        assert (said, peer.recv(1)) == (b"quic", b"k")
        peer.close()
        slow.sendall(b"ow")
        peer, said = next(guests)
        assert said == b"slow"
        peer.close()
        come(b"cut").shutdown(socket.SHUT_WR)
        peer, said = next(guests)
        assert said == b"cut"
        peer.close()


def test_the_silent_are_sent_away_at_the_deadline(door, come):
    door.listen(8)
    guest = come()
    with (
        closing(greetings(door, 4, time.monotonic() + 0.05, late)) as guests,
        pytest.raises(DeadlineExceeded, match="nob"),
    ):
        next(guests)
    guest.settimeout(30)
    assert guest.recv(1) == b""


def test_a_door_that_is_shut_is_an_error(door):
    door.listen(8)
    door.shutdown(socket.SHUT_RDWR)
    with closing(greetings(door, 4, soon(), late)) as guests, pytest.raises(OSError, match="was shut"):
        next(guests)


def test_a_door_that_is_closed_before_anybody_is_let_in_is_an_error():
    """As by another thread, between any two steps."""

    class Closing(socket.socket):
        def setblocking(self, flag):
            super().setblocking(flag)
            self.close()

    with closing(greetings(Closing(socket.AF_UNIX), 6, soon(), late)) as guests, pytest.raises(OSError, match="shut"):
        next(guests)


def test_a_door_that_is_closed_as_somebody_knocks_is_an_error(door, come):
    door.listen()
    come()
    with closing(greetings(door, 4, soon(), late, door.close)) as guests, pytest.raises(OSError):
        next(guests)


def test_of_a_silent_crowd_only_so_many_are_kept(door, come):
    """Otherwise it would take all descriptors that the process may have."""
    door.listen(3 * CROWD)
    with closing(greetings(door, 4, soon(), late)) as guests:
        waiting = Task(next, guests)
        crowd = [come() for _ in range(2 * CROWD + 1)]
        time.sleep(3 * PATIENCE)
        come(b"here")
        peer, said = waiting.result()
        assert said == b"here"
        peer.close()
        is_there = [see_open(guest) for guest in crowd]
        assert is_there == sorted(is_there)
        assert 0 < sum(is_there) < CROWD


def see_open(guest):
    guest.setblocking(False)
    try:
        return guest.recv(1) != b""
    except BlockingIOError:
        return True


def test_who_waits_looks_now_and_then_whether_to_go_on(door, come):
    door.listen(8)
    come(b"here")

    def look():
        raise PeerLost("one has gone")

    with closing(greetings(door, 4, soon(), late, look)) as guests, pytest.raises(PeerLost, match="one has gone"):
        next(guests)
    looked = []
    with closing(greetings(door, 4, time.monotonic() + 1.2, late, lambda: looked.append(1))) as guests:
        next(guests)[0].close()
        with pytest.raises(DeadlineExceeded):
            next(guests)
    assert len(looked) >= 3
