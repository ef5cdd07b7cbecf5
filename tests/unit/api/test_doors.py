"""Meeting at a socket: nobody waits for strangers, nor for a listener that lets nobody in."""

import socket
import time
from contextlib import closing

import pytest

from tpserve.api import DeadlineExceeded, TransportError
from tpserve.api.doors import dial, greetings


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
