"""Addresses that are malformed, and paths that are taken."""

import socket

import pytest

from tpserve.api import TransportError
from tpserve.api.addresses import check_address, free_path


@pytest.mark.parametrize(
    "address", ["ipc:///run/x", "tcp://127.0.0.1:80", "tcp://[::1]:65535", "tcp://[fe80::1%lo]:1", "tcp://a-1.b_c:1"]
)
def test_an_address_comes_back(address):
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "x",
        "ipc://",
        "ipc://here",
        "ipc:///",
        "ipc:///usr",
        "ipc:///a\0b",
        "udp://h:1",
        "tcp://h",
        "tcp://h:",
        "tcp://h:x",
        "tcp://:1",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://[::1:1",
        "tcp://[1]:1",
        "tcp://::1:1",
        "TCP://h:1",
        "tcp://h:+1",
        "tcp://h:1/",
        "tcp://h:1?a=b",
        "tcp://h:1#a",
        "tcp://h:1\n",
        "tcp://user@h:1",
        "tcp://h h:1",
        "ipc:///a\nb",
        "ipc:///\udcff",
        f"ipc:///{'long' * 64}",
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
        with pytest.raises(TransportError, match="somebody is bound"):
            free_path(path)
        door.settimeout(0)
        with pytest.raises(BlockingIOError):
            door.accept()
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(str(path))


def test_a_living_socket_of_another_type_stays(tmp_path):
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.bind(str(path))
        with pytest.raises(TransportError, match="somebody is bound"):
            free_path(path)
    assert path.exists()


def test_what_is_no_socket_stays(tmp_path):
    file, link, folder = tmp_path / "file", tmp_path / "link", tmp_path / "folder"
    file.write_text("notes")
    link.symlink_to(file)
    folder.mkdir()
    for path in (file, link, folder):
        with pytest.raises(TransportError, match="not a socket"):
            free_path(path)
    assert file.read_text() == "notes"
    assert link.is_symlink()
    assert folder.is_dir()


def test_a_path_that_cannot_be_looked_at_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "door", tmp_path / ("long" * 100)):
        with pytest.raises(TransportError, match="cannot bind"):
            free_path(path)
