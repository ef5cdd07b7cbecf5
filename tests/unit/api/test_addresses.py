"""Addresses that are malformed, and paths that are taken."""

import errno
import socket

import pytest

from tpserve.api import TransportError
from tpserve.api.addresses import check_address, free_path


@pytest.mark.parametrize("address", ["ipc:///run/x", "tcp://127.0.0.1:80", "tcp://[::1]:65535", "tcp://some.host:1"])
def test_an_address_comes_back(address):
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "x",
        "ipc://",
        "udp://h:1",
        "tcp://h",
        "tcp://h:",
        "tcp://h:x",
        "tcp://:1",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://[::1:1",
    ],
)
def test_another_is_named(address):
    with pytest.raises(TransportError) as caught:
        check_address(address)
    assert repr(address) in str(caught.value)


def test_a_file_that_was_left_goes(tmp_path):
    path = tmp_path / "door"
    free_path(path)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
    assert path.exists()
    free_path(path)
    assert not path.exists()


def test_a_living_socket_stays_and_hears_nothing(tmp_path):
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        with pytest.raises(OSError) as caught:
            free_path(path)
        assert caught.value.errno == errno.EADDRINUSE
        door.settimeout(0)
        with pytest.raises(BlockingIOError):
            door.accept()
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(str(path))
