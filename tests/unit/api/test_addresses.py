"""Addresses that are malformed, and paths that are taken."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from threading import Barrier

import pytest

from tpserve.api import TransportError, addresses
from tpserve.api.addresses import alone_in, check_address, taking
from tpserve.testing.lab import Task


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
        "tcp://a..b:1",
        f"tcp://{'a' * 64}:1",
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
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as door, taking(path):
            assert not path.exists()
            door.bind(str(path))
        assert path.exists()


def test_a_living_socket_stays_and_hears_nothing(tmp_path):
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        with pytest.raises(TransportError, match="somebody is bound"), taking(path):
            pass
        door.settimeout(0)
        with pytest.raises(BlockingIOError):
            door.accept()
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(str(path))


def test_a_living_socket_of_another_type_stays(tmp_path):
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.bind(str(path))
        with pytest.raises(TransportError, match="somebody is bound"), taking(path):
            pass
    assert path.exists()


def test_what_is_no_socket_stays(tmp_path):
    file, link, folder = tmp_path / "file", tmp_path / "link", tmp_path / "folder"
    file.write_text("notes")
    link.symlink_to(file)
    folder.mkdir()
    for path in (file, link, folder):
        with pytest.raises(TransportError, match="not a socket"), taking(path):
            pass
    assert file.read_text() == "notes"
    assert link.is_symlink()
    assert folder.is_dir()


def test_a_path_that_cannot_be_looked_at_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "door", tmp_path / ("long" * 100)):
        with pytest.raises(TransportError, match="cannot bind"), taking(path):
            pass


def test_of_many_who_take_a_path_at_once_one_has_it(tmp_path):
    path = tmp_path / "door"
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))
        doors = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        together = Barrier(4)

        def take(door, together=together):
            together.wait()
            with taking(path):
                door.bind(str(path))
                door.listen()

        taken = 0
        for task in [Task(take, door) for door in doors]:
            with suppress(TransportError):
                task.result()
                taken += 1
        assert taken == 1
        path.unlink()
        for door in doors:
            door.close()


def test_who_takes_a_path_waits_no_longer_than_a_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(addresses, "PATIENCE", 0.05)
    with (
        alone_in(tmp_path),
        pytest.raises(TransportError, match="somebody else has locked it"),
        taking(tmp_path / "door"),
    ):
        pass
    with taking(tmp_path / "door"):
        pass


def test_a_process_that_was_forked_meanwhile_holds_nothing(tmp_path):
    with alone_in(tmp_path):
        (mine,) = [descriptor for descriptor in Path("/proc/self/fd").iterdir() if _leads_to(descriptor, tmp_path)]
        its = os.dup(int(mine.name))
    with alone_in(tmp_path):
        os.close(its)


def test_what_cannot_be_bound_is_an_error(tmp_path):
    for name in ("none/door", "long" * 40):
        with (
            socket.socket(socket.AF_UNIX) as door,
            pytest.raises(TransportError, match="cannot bind"),
            taking(tmp_path / name),
        ):
            door.bind(str(tmp_path / name))


def _leads_to(descriptor, path):
    with suppress(FileNotFoundError):  # what lists them is one of them
        return descriptor.readlink() == path
    return False
