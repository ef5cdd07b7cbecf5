"""Whoever comes to a port may send what he likes: an error says so, and never one that nobody expects."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tpserve.api import DeadlineExceeded, FrameError, PeerLost
from tpserve.api.flow import WORD
from tpserve.testing.lab import Task
from tpserve_transport_zmq.fanout import HELLO, READY
from tpserve_transport_zmq.plugin import ZmqOptions
from tpserve_transport_zmq.transport import ZmqTransport

FRAMES = [b"-" * 400] * 8


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def transport() -> Iterator[ZmqTransport]:
    transport = ZmqTransport(ZmqOptions(send_buffer=1000, batch=400, linger=0))
    yield transport
    transport.close()


@pytest.fixture
def stranger() -> Iterator[zmq.SyncSocket]:
    """A socket that connects."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.linger = 0
        yield made


@pytest.fixture
def host(address: str) -> Iterator[zmq.SyncSocket]:
    """A socket that is there first."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        made.linger = 0
        made.bind(address)
        yield made


def soon() -> float:
    return time.monotonic() + 30


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"x"],
        [HELLO],
        [HELLO, b"1234567"],
        [HELLO, WORD.pack(9)],
        [HELLO, WORD.pack(0), b""],
        [HELLO, WORD.pack(0), b"x"],
    ],
)
def test_a_leader_does_not_answer_who_is_no_follower(
    transport: ZmqTransport, stranger: Any, address: str, parts: list[bytes]
) -> None:
    leader = transport.fanout_sender(address, 1)
    stranger.connect(address)
    stranger.send_multipart(parts)
    with pytest.raises(DeadlineExceeded, match=r"0 of 1 followers came to .* somebody who said"):
        leader.connect(time.monotonic() + 0.3)

    connecting = Task(transport.fanout_receiver(address, 0, 1).connect, soon())
    leader.connect(soon())
    connecting.result()
    assert not stranger.poll(0)


def test_two_followers_of_one_number_are_an_error(transport: ZmqTransport, stranger: Any, address: str) -> None:
    leader = transport.fanout_sender(address, 2)
    stranger.connect(address)
    for _ in range(2):
        stranger.send_multipart([HELLO, WORD.pack(1)])

    with pytest.raises(FrameError, match=f"second follower 1 .*{address}"):
        leader.connect(soon())


def test_an_end_that_nobody_closes_holds_nobody_up(address: str) -> None:
    """Its context waits, when it is collected, for what its sockets are to deliver."""
    code = f"""if True:
        import time
        from tpserve.api import DeadlineExceeded
        from tpserve_transport_zmq.plugin import ZmqOptions
        from tpserve_transport_zmq.transport import ZmqTransport

        def give_up():
            end = ZmqTransport(ZmqOptions()).fanout_receiver("{address}", 0, 1)
            try:
                end.connect(time.monotonic() + 0.1)
            except DeadlineExceeded:
                print("gave up")

        give_up()
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert ended.stdout == "gave up\n"


@pytest.mark.parametrize("parts", [[b""], [b"1234567"], [WORD.pack(0)], [WORD.pack(1 << 40)], [b"two", b"parts"]])
def test_a_leader_takes_marks_only(transport: ZmqTransport, stranger: Any, address: str, parts: list[bytes]) -> None:
    leader = transport.fanout_sender(address, 1)
    stranger.connect(address)
    stranger.send_multipart([HELLO, WORD.pack(0)])
    leader.connect(soon())
    stranger.send_multipart(parts)

    with pytest.raises(FrameError):
        leader.send_many(FRAMES, soon())


@pytest.mark.parametrize("parts", [[WORD.pack(400)], [HELLO, WORD.pack(0)], [b""]])
def test_a_leader_takes_no_notice_of_who_comes_late(
    transport: ZmqTransport, stranger: Any, address: str, parts: list[bytes]
) -> None:
    leader, follower = transport.fanout_sender(address, 1), transport.fanout_receiver(address, 0, 1)
    connecting = Task(lambda: follower.connect(soon()))
    leader.connect(soon())
    connecting.result()
    stranger.connect(address)
    stranger.send_multipart(parts)

    with pytest.raises(DeadlineExceeded):
        leader.send_many(FRAMES, time.monotonic() + 0.3)


@pytest.mark.parametrize("parts", [[b""], [b"", b""], [b"1234567", b""], [WORD.pack(0)], [WORD.pack(0), b"", b""]])
def test_a_follower_takes_packets_only(transport: ZmqTransport, host: Any, address: str, parts: list[bytes]) -> None:
    follower = transport.fanout_receiver(address, 0, 1)
    connecting = Task(lambda: follower.connect(soon()))
    name = host.recv_multipart()[0]
    host.send_multipart([name, READY])
    connecting.result()
    host.send_multipart([name, *parts])

    with pytest.raises(FrameError):
        follower.recv_many(1, soon())


@pytest.mark.parametrize("parts", [[b""], [b"1234567"], [WORD.pack(0)], [WORD.pack(1 << 40)], [b"two", b"parts"]])
def test_a_sender_takes_marks_only(transport: ZmqTransport, host: Any, address: str, parts: list[bytes]) -> None:
    sender = transport.pipe_sender(address)
    sender.connect(soon())
    sender.send(FRAMES[0], soon())
    host.send_multipart([host.recv_multipart()[0], *parts])
    sender.send(FRAMES[1], soon())

    with pytest.raises(FrameError):
        sender.send(FRAMES[2], soon())


@pytest.mark.parametrize("parts", [[b""], [b"x" * 15, b"frame"], [WORD.pack(3) + WORD.pack(0)], [bytes(16), b"", b""]])
def test_a_receiver_takes_messages_only(
    transport: ZmqTransport, stranger: Any, address: str, parts: list[bytes]
) -> None:
    receiver = transport.pipe_receiver(address)
    stranger.connect(address)
    stranger.send_multipart(parts)

    with pytest.raises(FrameError):
        receiver.recv_many(1, 1000, soon())


def test_a_follower_that_stands_still_is_not_asked_again_and_again(
    transport: ZmqTransport, stranger: Any, address: str
) -> None:
    leader = transport.fanout_sender(address, 1)
    stranger.connect(address)
    stranger.send_multipart([HELLO, WORD.pack(0)])
    leader.connect(soon())
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            leader.send_many(FRAMES, time.monotonic() + 0.7)

    questions = 0
    while stranger.poll(100):
        questions += len(stranger.recv()) == 2 * WORD.size  # no frames, just a mark
    assert 1 <= questions <= 4


def test_a_follower_that_goes_while_it_is_waited_for_is_lost(
    transport: ZmqTransport, stranger: Any, address: str
) -> None:
    leader = transport.fanout_sender(address, 1)
    stranger.connect(address)
    stranger.send_multipart([HELLO, WORD.pack(0)])
    leader.connect(soon())
    sending = Task(lambda: leader.send_many(FRAMES, soon()))
    time.sleep(1)
    stranger.close()

    with pytest.raises(PeerLost):
        sending.result(5)
