"""Strangers make nobody fail; what an end of our own says wrongly is an error, and never one that nobody expects."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pynng
import pytest

from tpserve.api import DeadlineExceeded, FrameError, PeerLost
from tpserve.api.flow import WORD
from tpserve.testing.lab import Task
from tpserve_transport_nng import pipe
from tpserve_transport_nng.fanout import HELLO, LARGEST, READY
from tpserve_transport_nng.plugin import NngOptions
from tpserve_transport_nng.transport import NngTransport

FRAMES = [b"-" * 400] * 8
NONSENSE = [b"nonsense", b"", bytes(16), bytes(9) + b"frame", pipe.PREFIX.pack(0, True) + b"frame", bytes(1 << 20)]
NO_MARKS = [b"x", b"1234567", WORD.pack(0), WORD.pack(1 << 40), b"x" * 9]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def transport() -> Iterator[NngTransport]:
    transport = NngTransport(NngOptions(send_buffer=1000, batch=400, linger=0))
    yield transport
    transport.close()


def soon() -> float:
    return time.monotonic() + 30


@contextmanager
def nonsense(kind: Any, address: str) -> Iterator[None]:
    """Strangers with sockets of this kind, who come and say all of that; and stay."""
    with ExitStack() as guests:
        for message in NONSENSE:
            guest = guests.enter_context(kind(send_timeout=100))
            guest.dial(address)
            with suppress(pynng.Timeout):  # it was turned away already
                guest.send(message)
        time.sleep(0.2)
        yield


@pytest.mark.parametrize("greeting", [b"x", b"", READY])
def test_a_leader_turns_away_who_is_no_follower(transport: NngTransport, port: int, greeting: bytes) -> None:
    address = f"tcp://127.0.0.1:{port}"
    leader = transport.fanout_sender(address, 1)
    with pynng.Pair0(dial=address) as stranger:
        for _ in range(3):
            stranger.send(greeting)
        with pytest.raises(DeadlineExceeded, match=r"0 of 1 followers came .* somebody who said"):
            leader.connect(time.monotonic() + 0.3)
        stranger.close()  # it has tried again meanwhile
        time.sleep(0.5)
        connecting = Task(transport.fanout_receiver(address, 0, 1).connect, soon())
        leader.connect(soon())
        connecting.result()


def test_strangers_with_sockets_of_nng_hold_no_follower_up(transport: NngTransport, port: int) -> None:
    """They come before the join, meanwhile, and when frames are under way and the window is full."""
    leader = transport.fanout_sender(f"tcp://127.0.0.1:{port}", 2)
    place = f"tcp://127.0.0.1:{port + 1}"
    leading = Task(leader.connect, soon())
    followers = [transport.fanout_receiver(f"tcp://127.0.0.1:{port}", number, 2) for number in range(2)]
    with nonsense(pynng.Pair0, place):
        joining = [Task(followers[0].connect, soon())]
        with nonsense(pynng.Pair0, place):
            joining.append(Task(followers[1].connect, soon()))
            for task in (leading, *joining):
                task.result()
        sending = Task(leader.send_many, FRAMES, soon())
        with nonsense(pynng.Pair0, place):
            reading = [Task(end.recv_many, len(FRAMES), soon()) for end in followers]
            assert [task.result() for task in reading] == [FRAMES] * 2
        sending.result()


@pytest.mark.parametrize("count", [1, 3])
def test_a_silent_stranger_with_a_socket_of_nng_takes_nobodys_place(
    transport: NngTransport, port: int, count: int
) -> None:
    """Though it comes again when it is turned away; and a follower that was turned away for it says nothing twice."""
    address = f"tcp://127.0.0.1:{port}"
    leader = transport.fanout_sender(address, 1)
    follower = transport.fanout_receiver(address, 0, 1)
    with ExitStack() as guests:
        for _ in range(count):
            guests.enter_context(pynng.Pair0()).dial(address, block=False)
        time.sleep(0.2)
        tasks = [Task(end.connect, soon()) for end in (leader, follower)]
        for task in tasks:
            task.result()
        sending = Task(leader.send_many, FRAMES, soon())
        assert follower.recv_many(len(FRAMES), soon()) == FRAMES
        sending.result()


def test_a_follower_that_says_too_much_is_cut_off(transport: NngTransport, port: int) -> None:
    leader = transport.fanout_sender(f"tcp://127.0.0.1:{port}", 1)
    with pynng.Pair0(dial=f"tcp://127.0.0.1:{port}") as stranger:
        stranger.send(HELLO)
        leader.connect(soon())
        stranger.send(bytes(LARGEST + 1))
        time.sleep(0.3)

        with pytest.raises(PeerLost):
            leader.send_many(FRAMES[:1], soon())


def test_a_leader_lets_a_follower_in_where_somebody_was(transport: NngTransport, port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    leader = transport.fanout_sender(address, 1)
    leading = Task(leader.connect, soon())
    for _ in range(3):
        pynng.Pair0(dial=address).close()
    time.sleep(1)
    transport.fanout_receiver(address, 0, 1).connect(soon())
    leading.result()


@pytest.mark.parametrize("mark", NO_MARKS)
def test_a_leader_takes_marks_only(transport: NngTransport, port: int, mark: bytes) -> None:
    leader = transport.fanout_sender(f"tcp://127.0.0.1:{port}", 1)
    with pynng.Pair0(dial=f"tcp://127.0.0.1:{port}") as stranger:
        stranger.send(HELLO)
        leader.connect(soon())
        stranger.send(mark)

        with pytest.raises(FrameError):
            leader.send_many(FRAMES, soon())


@pytest.mark.parametrize("packet", [b"", b"1234567", WORD.pack(8) + b"1", WORD.pack(16) + WORD.pack(0) * 2 + b"x"])
def test_a_follower_takes_packets_only(transport: NngTransport, port: int, packet: bytes) -> None:
    with pynng.Pair0(listen=f"tcp://127.0.0.1:{port}", recv_timeout=30_000) as host:
        follower = transport.fanout_receiver(f"tcp://127.0.0.1:{port}", 0, 1)
        connecting = Task(lambda: follower.connect(soon()))
        assert host.recv() == HELLO
        host.send(READY)
        connecting.result()
        host.send(packet)

        with pytest.raises(FrameError):
            follower.recv_many(1, soon())


@pytest.mark.parametrize("mark", NO_MARKS)
def test_a_sender_takes_marks_only(transport: NngTransport, port: int, mark: bytes) -> None:
    with pynng.Pair1(listen=f"tcp://127.0.0.1:{port}") as host:
        sender = transport.pipe_sender(f"tcp://127.0.0.1:{port}")
        sender.connect(soon())
        host.send(mark)
        for frame in FRAMES[:2]:
            sender.send(frame, soon())

        with pytest.raises(FrameError):
            sender.send(FRAMES[2], soon())


@pytest.mark.parametrize("message", [b"", b"x", b"12345678"])
def test_a_receiver_takes_messages_only(transport: NngTransport, port: int, message: bytes) -> None:
    """Of who has said HELLO."""
    receiver = transport.pipe_receiver(f"tcp://127.0.0.1:{port}")
    with pynng.Pair1(dial=f"tcp://127.0.0.1:{port}") as sender:
        sender.send(pipe.HELLO)
        sender.send(message)

        with pytest.raises(FrameError):
            receiver.recv_many(1, 1000, soon())


@pytest.mark.parametrize("patience", [0.0, 0.5])
def test_strangers_with_sockets_of_nng_make_no_receiver_fail(
    transport: NngTransport, port: int, patience: float
) -> None:
    """Whatever they say, and though they come again when they are turned away; they may have left before it is read."""
    address = f"tcp://127.0.0.1:{port}"
    receiver = transport.pipe_receiver(address)
    with nonsense(pynng.Pair1, address):
        assert receiver.recv_many(10, 1 << 20, patience and time.monotonic() + patience) == []
        sender = transport.pipe_sender(address)
        sender.connect(soon())
        for number in range(3):
            with nonsense(pynng.Pair1, address):
                sender.send(b"%d" % number, soon())
            assert receiver.recv_many(10, 1 << 20, soon()) == [b"%d" % number]


def test_a_pair_that_is_taken_is_not_lost_when_a_stranger_knocks(transport: NngTransport, port: int) -> None:
    leader = transport.fanout_sender(f"tcp://127.0.0.1:{port}", 1)
    follower = transport.fanout_receiver(f"tcp://127.0.0.1:{port}", 0, 1)
    connecting = Task(lambda: follower.connect(soon()))
    leader.connect(soon())
    connecting.result()
    with pynng.Pair0(dial=f"tcp://127.0.0.1:{port}"):
        time.sleep(0.1)
    time.sleep(0.1)
    leader.send_many([b"still", b"there"], soon())

    assert follower.recv_many(2, soon()) == [b"still", b"there"]


def test_a_follower_that_has_lost_its_leader_does_not_come_to_the_next(tmp_path: Path, transport: NngTransport) -> None:
    place = f"ipc://{tmp_path}/link"
    follower = transport.fanout_receiver(place, 0, 1)
    with pynng.Pair0(listen=f"{place}.0", recv_timeout=30_000) as host:
        connecting = Task(lambda: follower.connect(soon()))
        assert host.recv() == HELLO
    with pytest.raises(PeerLost):
        connecting.result()
    came = Event()
    with pynng.Pair0() as host:
        host.add_pre_pipe_connect_cb(lambda _: came.set())
        host.listen(f"{place}.0")
        assert not came.wait(1)


def test_one_follower_that_stands_still_hides_no_other_that_goes(tmp_path: Path) -> None:
    """The leader waits to write to the first, whose queues are full."""
    transport = NngTransport(NngOptions(linger=0))
    leader = transport.fanout_sender(f"ipc://{tmp_path}/link", 2)
    still, going = (pynng.Pair0(dial=f"ipc://{tmp_path}/link.{follower}") for follower in range(2))
    for end in (still, going):
        end.send(HELLO)
    leader.connect(soon())
    sending = Task(lambda: [leader.send_many([bytes(1 << 18)], soon()) for _ in range(100)])
    time.sleep(1)
    assert not sending.is_done
    going.close()
    with pytest.raises(PeerLost, match="follower 1 of"):
        sending.result(5)
    still.close()
    transport.close()


def test_a_leader_that_has_gone_is_owed_no_mark(transport: NngTransport, port: int) -> None:
    """What it sent before is delivered, though a mark is asked for in the middle."""
    leader = transport.fanout_sender(f"tcp://127.0.0.1:{port}", 1)
    follower = transport.fanout_receiver(f"tcp://127.0.0.1:{port}", 0, 1)
    connecting = Task(lambda: follower.connect(soon()))
    leader.connect(soon())
    connecting.result()
    for frame in FRAMES[:2]:
        leader.send_many([frame], soon())
    time.sleep(0.2)
    leader.close()
    time.sleep(0.2)

    assert follower.recv_many(2, soon()) == FRAMES[:2]
    with pytest.raises(PeerLost):
        follower.recv_many(1, soon())
