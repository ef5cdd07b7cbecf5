"""Where a fan-out meets: no stranger holds a follower up, and whoever leaves on the way is missed."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pynng
import pytest

from tpserve.api import Closed, DeadlineExceeded, FrameError, PeerLost, TransportError
from tpserve.testing.lab import Task, leaks_files, wake
from tpserve.testing.strangers import listening
from tpserve_transport_nng import door
from tpserve_transport_nng.door import Door
from tpserve_transport_nng.plugin import NngOptions
from tpserve_transport_nng.sockets import PairSocket
from tpserve_transport_nng.transport import NngTransport
from tpserve_transport_nng.words import of_follower

FRAMES = [b"-" * 400] * 8
READY = of_follower(0, 1).answer
SPEAKS_NNG = b"\0SP\0\0\x10\0\0"
"""What a Pair0 says first."""

SILENT, BACK_AT_ONCE = 60, 8
ENDS = [None, b"", b"nonsense" * 9]
"""What is said in place of nng's handshake; with None nothing is, for somebody has gone."""


def greeting(follower: int, followers: int) -> bytes:
    return of_follower(follower, followers).greeting


@pytest.fixture
def transport() -> Iterator[NngTransport]:
    transport = NngTransport(NngOptions(linger=0))
    yield transport
    transport.close()


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "ipc":
        return f"ipc://{tmp_path}/link"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def soon() -> float:
    return time.monotonic() + 15


def guest(address: str) -> socket.socket:
    """A connection with who listens there."""
    if address.startswith("ipc://"):
        end = socket.socket(socket.AF_UNIX)
        end.connect(address.removeprefix("ipc://"))
        return end
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


@contextmanager
def crowd(address: str) -> Iterator[None]:
    """Strangers who speak nng's protocol and say nothing: some stay, and come again when nng does; some do at once."""
    done = Event()

    def come_back() -> None:
        while not done.is_set():
            with suppress(OSError), guest(address) as end:
                end.settimeout(0.1)
                end.sendall(SPEAKS_NNG)
                while not done.is_set():
                    with suppress(TimeoutError):
                        if not end.recv(100):
                            break

    with ExitStack() as stack:
        for _ in range(SILENT):
            pair = stack.enter_context(pynng.Pair0(reconnect_time_min=10, reconnect_time_max=10))
            pair.dial(address, block=False)
        threads = [Thread(target=come_back) for _ in range(BACK_AT_ONCE)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(done.set)
        time.sleep(0.2)
        yield


@contextmanager
def crowds(before: set[Any]) -> Iterator[None]:
    """Such a crowd at every place where somebody has begun to listen."""
    with ExitStack() as stack:
        places = listening() - before
        assert places
        for place in places:
            at = f"ipc://{place.address}" if place.family == socket.AF_UNIX else "tcp://{}:{}".format(*place.address)
            stack.enter_context(crowd(at))
        yield


def test_a_silent_crowd_with_sockets_of_nng_holds_nobody_up(transport: NngTransport, address: str) -> None:
    """It comes before followers do, and again where somebody listens then."""
    before = listening()
    leader = transport.fanout_sender(address, 2)
    followers = [transport.fanout_receiver(address, number, 2) for number in range(2)]
    with crowds(before):
        joining = [Task(end.connect, soon()) for end in (leader, followers[0])]
        time.sleep(0.2)
        with crowds(before):
            joining.append(Task(followers[1].connect, soon()))
            for task in joining:
                task.result()
            for _ in range(3):
                reading = [Task(end.recv_many, len(FRAMES), soon()) for end in followers]
                leader.send_many(FRAMES, soon())
                assert [task.result() for task in reading] == [FRAMES] * 2


@pytest.mark.parametrize("words", [b"x", READY, SPEAKS_NNG, greeting(1, 1), greeting(0, 2), greeting(0, 1)[:-1] + b"!"])
def test_a_leader_sends_away_who_is_none_of_its_followers(transport: NngTransport, address: str, words: bytes) -> None:
    leader = transport.fanout_sender(address, 1)
    with guest(address) as stranger:
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(DeadlineExceeded, match=r"0 of 1 followers came .* somebody who said"):
            leader.connect(time.monotonic() + 0.3)
        assert stranger.recv(1) == b""


def test_a_follower_of_another_fan_out_is_told_so(transport: NngTransport, address: str) -> None:
    leader = transport.fanout_sender(address, 1)
    leading = Task(leader.connect, soon())
    with pytest.raises(PeerLost, match="does not expect follower 0 of 2"):
        transport.fanout_receiver(address, 0, 2).connect(soon())
    transport.fanout_receiver(address, 0, 1).connect(soon())
    leading.result()


def test_a_second_follower_of_a_number_is_an_error(transport: NngTransport, address: str) -> None:
    leader = transport.fanout_sender(address, 2)
    tasks = [Task(transport.fanout_receiver(address, 0, 2).connect, soon()) for _ in range(2)]
    with pytest.raises(FrameError, match="a second follower 0"):
        leader.connect(soon())
    for task in tasks:
        with pytest.raises(PeerLost):
            task.result()


def test_a_follower_that_goes_while_others_are_waited_for_is_missed(transport: NngTransport, address: str) -> None:
    leading = Task(transport.fanout_sender(address, 2).connect, soon())
    with guest(address) as end:
        end.sendall(greeting(1, 2))
        time.sleep(0.2)
        assert not leading.is_done
    with pytest.raises(PeerLost, match="follower 1 of"):
        leading.result(5)


def test_one_follower_that_stands_still_at_a_handshake_hides_no_other_that_goes(
    transport: NngTransport, address: str
) -> None:
    leading = Task(transport.fanout_sender(address, 3).connect, soon())
    joining = Task(transport.fanout_receiver(address, 2, 3).connect, soon())
    with guest(address) as still, guest(address) as going:
        still.sendall(greeting(0, 3))
        going.sendall(greeting(1, 3))
        joining.result()
        time.sleep(0.2)
        assert not leading.is_done
        going.close()
        with pytest.raises(PeerLost, match="follower 1 of"):
            leading.result(5)


def test_a_leader_that_goes_while_others_are_waited_for_is_missed(transport: NngTransport, address: str) -> None:
    joining = Task(transport.fanout_receiver(address, 0, 2).connect, soon())
    with closing(Door(address, 2)) as door, pytest.raises(DeadlineExceeded), door.meeting(time.monotonic() + 0.5):
        pass
    with pytest.raises(PeerLost):
        joining.result(5)


@pytest.mark.parametrize("words", ENDS)
def test_a_follower_that_does_not_begin_to_speak_nng_is_no_follower(
    transport: NngTransport, address: str, words: bytes | None
) -> None:
    leader = transport.fanout_sender(address, 1)
    leading = Task(leader.connect, time.monotonic() + 2)
    with guest(address) as end:
        end.sendall(greeting(0, 1))
        assert end.recv(len(READY)) == READY
        see_what_comes_of_it(end, words, leading)


@pytest.mark.parametrize("words", ENDS)
def test_a_leader_that_does_not_begin_to_speak_nng_is_no_leader(
    transport: NngTransport, address: str, words: bytes | None
) -> None:
    joining = Task(transport.fanout_receiver(address, 0, 1).connect, time.monotonic() + 2)
    with closing(Door(address, 1)) as door, door.meeting(soon()) as (end,):
        end.sendall(READY)
        see_what_comes_of_it(end, words, joining)


def see_what_comes_of_it(end: socket.socket, words: bytes | None, task: Task[None]) -> None:
    """PeerLost, if it is heard; somebody who says nothing may do so later."""
    if words is None:
        end.close()
    else:
        end.sendall(words)
    with pytest.raises(DeadlineExceeded if words == b"" else PeerLost):
        task.result(5)


@pytest.mark.parametrize("words", [b"nonsense" * 9, READY[:-1] + b"!", SPEAKS_NNG])
def test_who_is_no_leader_is_an_error(transport: NngTransport, address: str, words: bytes) -> None:
    follower = transport.fanout_receiver(address, 0, 1)
    joining = Task(follower.connect, soon())
    with closing(Door(address, 1)) as door, door.meeting(soon()) as (end,):
        end.sendall(words)
        end.shutdown(socket.SHUT_WR)
        with pytest.raises(FrameError, match="expected a leader's greeting"):
            joining.result()


def test_closing_wakes_whoever_waits_for_a_handshake(transport: NngTransport, address: str) -> None:
    """Of a peer that has come and does not go on."""
    leader = transport.fanout_sender(address, 1)
    with guest(address) as end:
        end.sendall(greeting(0, 1))
        assert wake(lambda: leader.connect(soon()), leader.close)
    follower = transport.fanout_receiver(address, 0, 1)
    with closing(Door(address, 1)) as door:

        def lead() -> None:
            with door.meeting(soon()) as (end,):
                end.sendall(READY)
                assert end.recv(len(SPEAKS_NNG)) == SPEAKS_NNG
                assert end.recv(1) == b""

        leading = Task(lead)
        assert wake(lambda: follower.connect(soon()), follower.close)
        leading.result()
    with pytest.raises(Closed):
        follower.connect(soon())


def test_closing_at_the_instant_of_a_handshake_leaves_nothing_open(transport: NngTransport, address: str) -> None:
    """Though nng forgets a connection then."""

    def close_at_once() -> None:
        for _ in range(20):
            leader = transport.fanout_sender(address, 1)
            leading = Task(leader.connect, soon())
            with guest(address) as end:
                end.sendall(greeting(0, 1))
                assert end.recv(len(READY)) == READY
                end.sendall(SPEAKS_NNG)
                leader.close()
            with suppress(Closed):
                leading.result()

    assert not leaks_files(close_at_once)


def test_a_leader_keeps_its_address_when_all_have_come(transport: NngTransport, address: str) -> None:
    leader = transport.fanout_sender(address, 1)
    leading = Task(leader.connect, soon())
    transport.fanout_receiver(address, 0, 1).connect(soon())
    leading.result()
    with pytest.raises(TransportError, match=address.removeprefix("ipc://")):
        transport.fanout_sender(address, 1)
    leader.close()
    transport.fanout_sender(address, 1).close()


def test_a_fan_out_leaves_its_directory_as_it_was(transport: NngTransport, tmp_path: Path) -> None:
    """There is one socket in it while there is a leader."""
    leader = transport.fanout_sender(f"ipc://{tmp_path}/link", 2)
    leading = Task(leader.connect, soon())
    joining = [
        Task(transport.fanout_receiver(f"ipc://{tmp_path}/link", number, 2).connect, soon()) for number in (0, 1)
    ]
    for task in (leading, *joining):
        task.result()
    assert os.listdir(tmp_path) == ["link"]  # noqa: PTH208 names are wanted
    leader.close()
    assert list(tmp_path.iterdir()) == []


def test_senders_may_come_at_once_and_come_and_go(transport: NngTransport, address: str) -> None:
    receiver = transport.pipe_receiver(address)

    def come(number: int) -> None:
        sender = transport.pipe_sender(address)
        sender.connect(soon())
        sender.send(b"%d" % number, soon())
        sender.close()

    for _ in range(3):
        coming = [Task(come, number) for number in range(20)]
        came: list[bytes] = []
        while len(came) < len(coming):
            some = receiver.recv_many(100, 1 << 20, soon())
            assert some
            came += some
        assert sorted(came) == sorted(b"%d" % number for number in range(20))
        for task in coming:
            task.result()


class NoThread:
    """One that there is no room for."""

    def __init__(self, **_: object) -> None: ...

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_a_receiver_that_gets_no_thread_leaves_its_address(
    transport: NngTransport, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(door, "Thread", NoThread)
        with pytest.raises(TransportError, match=r"cannot listen at .*: can't start") as caught:
            transport.pipe_receiver(address)
    assert caught.value.__traceback__  # which would keep the socket
    transport.pipe_receiver(address)


class NoDescriptor(socket.socket):
    """One in a process that may open no more."""

    def dup(self) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")


def test_a_connection_that_cannot_be_watched_is_an_error() -> None:
    """It says of whom, and stays with its owner."""
    with closing(PairSocket(pynng.Pair0(), "ipc:///link", "the peer")) as pair, NoDescriptor() as end:
        with pytest.raises(TransportError, match=r"cannot watch the peer: .*too many"):
            pair.adopt(end)
        assert end.fileno() >= 0
