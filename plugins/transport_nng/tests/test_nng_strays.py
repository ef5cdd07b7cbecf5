"""Whoever comes to a port may send what he likes: an error says so, and never one that nobody expects."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pynng
import pytest

from tpserve.api import FrameError, PeerLost
from tpserve.api.flow import WORD
from tpserve.testing.lab import Task
from tpserve_transport_nng.fanout import HELLO, READY
from tpserve_transport_nng.plugin import NngOptions
from tpserve_transport_nng.transport import NngTransport

FRAMES = [b"-" * 400] * 8
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


@pytest.mark.parametrize("greeting", [b"x", b"", READY])
def test_a_leader_greets_followers_only(transport: NngTransport, port: int, greeting: bytes) -> None:
    leader = transport.fanout_sender(f"tcp://127.0.0.1:{port}", 1)
    with pynng.Pair0(dial=f"tcp://127.0.0.1:{port}") as stranger:
        stranger.send(greeting)

        with pytest.raises(FrameError, match="expected a follower's greeting"):
            leader.connect(soon())


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
    receiver = transport.pipe_receiver(f"tcp://127.0.0.1:{port}")
    with pynng.Pair1(dial=f"tcp://127.0.0.1:{port}") as stranger:
        stranger.send(message)

        with pytest.raises(FrameError):
            receiver.recv_many(1, 1000, soon())


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
