"""Strangers make nobody fail; what an end of our own says wrongly is an error, and never one that nobody expects."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from threading import Thread
from typing import Any

import pytest
import zmq

from tpserve.api import DeadlineExceeded, FrameError, PeerLost
from tpserve.api.flow import WORD
from tpserve.testing.lab import Task
from tpserve_transport_zmq import fanout, pipe, sockets
from tpserve_transport_zmq.doorkeeper import NAME, Doorkeeper, introduce, require
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
    """A socket of zmq's own that connects."""
    yield from dealer(None)


@pytest.fixture
def follower() -> Iterator[zmq.SyncSocket]:
    """One that is let in by leaders."""
    yield from dealer(fanout.PROTOCOL)


@pytest.fixture
def sender() -> Iterator[zmq.SyncSocket]:
    """One that is let in by receivers."""
    yield from dealer(pipe.PROTOCOL)


@pytest.fixture
def leader(address: str) -> Iterator[zmq.SyncSocket]:
    """A socket that is there first, and lets followers in."""
    yield from router(address, fanout.PROTOCOL)


@pytest.fixture
def receiver(address: str) -> Iterator[zmq.SyncSocket]:
    """One that lets senders in."""
    yield from router(address, pipe.PROTOCOL)


def dealer(protocol: bytes | None) -> Iterator[zmq.SyncSocket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.linger = 0
        if protocol is not None:
            introduce(made, protocol)
        yield made


def router(address: str, protocol: bytes) -> Iterator[zmq.SyncSocket]:
    context = zmq.Context()
    doorkeeper = Doorkeeper(context)
    with context.socket(zmq.ROUTER) as made:
        made.linger = 0
        require(made, protocol)
        made.bind(address)
        yield made
    context.term()
    doorkeeper.join()


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
    transport: ZmqTransport, follower: Any, address: str, parts: list[bytes]
) -> None:
    leader = transport.fanout_sender(address, 1)
    follower.connect(address)
    follower.send_multipart(parts)
    with pytest.raises(DeadlineExceeded, match=r"0 of 1 followers came to .* somebody who said"):
        leader.connect(time.monotonic() + 0.3)

    connecting = Task(transport.fanout_receiver(address, 0, 1).connect, soon())
    leader.connect(soon())
    connecting.result()
    assert not follower.poll(0)


def test_of_two_followers_of_one_number_the_first_stays(transport: ZmqTransport, follower: Any, address: str) -> None:
    leader = transport.fanout_sender(address, 2)
    follower.connect(address)
    follower.send_multipart([HELLO, WORD.pack(1)])
    leading = Task(leader.connect, soon())
    time.sleep(0.1)
    with pytest.raises(DeadlineExceeded):
        transport.fanout_receiver(address, 1, 2).connect(time.monotonic() + 0.3)
    other = transport.fanout_receiver(address, 0, 2)
    other.connect(soon())
    leading.result()
    assert follower.recv() == READY


def test_a_follower_that_has_gone_leaves_its_place_to_the_next(
    transport: ZmqTransport, follower: Any, address: str
) -> None:
    """Such as one that was killed and started anew, before the others came."""
    leader = transport.fanout_sender(address, 2)
    follower.connect(address)
    follower.send_multipart([HELLO, WORD.pack(0)])
    leading = Task(leader.connect, soon())
    time.sleep(0.2)
    follower.close()
    ends = [transport.fanout_receiver(address, number, 2) for number in range(2)]
    joining = []
    for end in ends:
        joining.append(Task(end.connect, soon()))
        time.sleep(0.1)
    for task in (leading, *joining):
        task.result()
    leader.send_many([b"frame"], soon())
    assert [end.recv_many(1, soon()) for end in ends] == [[b"frame"]] * 2


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
def test_a_leader_takes_marks_only(transport: ZmqTransport, follower: Any, address: str, parts: list[bytes]) -> None:
    leader = transport.fanout_sender(address, 1)
    follower.connect(address)
    follower.send_multipart([HELLO, WORD.pack(0)])
    leader.connect(soon())
    follower.send_multipart(parts)

    with pytest.raises(FrameError):
        leader.send_many(FRAMES, soon())


@pytest.mark.parametrize("parts", [[WORD.pack(400)], [HELLO, WORD.pack(0)], [b""]])
def test_a_leader_takes_no_notice_of_who_comes_late(
    transport: ZmqTransport, follower: Any, address: str, parts: list[bytes]
) -> None:
    leader, end = transport.fanout_sender(address, 1), transport.fanout_receiver(address, 0, 1)
    connecting = Task(lambda: end.connect(soon()))
    leader.connect(soon())
    connecting.result()
    follower.connect(address)
    follower.send_multipart(parts)

    with pytest.raises(DeadlineExceeded):
        leader.send_many(FRAMES, time.monotonic() + 0.3)


@pytest.mark.parametrize("parts", [[b""], [b"", b""], [b"1234567", b""], [WORD.pack(0)], [WORD.pack(0), b"", b""]])
def test_a_follower_takes_packets_only(transport: ZmqTransport, leader: Any, address: str, parts: list[bytes]) -> None:
    follower = transport.fanout_receiver(address, 0, 1)
    connecting = Task(lambda: follower.connect(soon()))
    name = leader.recv_multipart()[0]
    leader.send_multipart([name, READY])
    connecting.result()
    leader.send_multipart([name, *parts])

    with pytest.raises(FrameError):
        follower.recv_many(1, soon())


@pytest.mark.parametrize("parts", [[b""], [b"1234567"], [WORD.pack(0)], [WORD.pack(1 << 40)], [b"two", b"parts"]])
def test_a_sender_takes_marks_only(transport: ZmqTransport, receiver: Any, address: str, parts: list[bytes]) -> None:
    end = transport.pipe_sender(address)
    end.connect(soon())
    end.send(FRAMES[0], soon())
    receiver.send_multipart([receiver.recv_multipart()[0], *parts])
    end.send(FRAMES[1], soon())

    with pytest.raises(FrameError):
        end.send(FRAMES[2], soon())


@pytest.mark.parametrize("parts", [[b""], [b"x" * 15, b"frame"], [WORD.pack(3) + WORD.pack(0)], [bytes(16), b"", b""]])
def test_a_receiver_takes_messages_only(transport: ZmqTransport, sender: Any, address: str, parts: list[bytes]) -> None:
    receiver = transport.pipe_receiver(address)
    sender.connect(address)
    sender.send_multipart(parts)

    with pytest.raises(FrameError):
        receiver.recv_many(1, 1000, soon())


def test_a_follower_that_stands_still_is_not_asked_again_and_again(
    transport: ZmqTransport, follower: Any, address: str
) -> None:
    leader = transport.fanout_sender(address, 1)
    follower.connect(address)
    follower.send_multipart([HELLO, WORD.pack(0)])
    leader.connect(soon())
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            leader.send_many(FRAMES, time.monotonic() + 0.7)

    questions = 0
    while follower.poll(100):
        questions += len(follower.recv()) == 2 * WORD.size  # no frames, just a mark
    assert 1 <= questions <= 4


def test_a_follower_that_goes_while_it_is_waited_for_is_lost(
    transport: ZmqTransport, follower: Any, address: str
) -> None:
    leader = transport.fanout_sender(address, 1)
    follower.connect(address)
    follower.send_multipart([HELLO, WORD.pack(0)])
    leader.connect(soon())
    sending = Task(lambda: leader.send_many(FRAMES, soon()))
    time.sleep(1)
    follower.close()

    with pytest.raises(PeerLost):
        sending.result(5)


def test_a_follower_that_says_too_much_is_cut_off(transport: ZmqTransport, follower: Any, address: str) -> None:
    leader = transport.fanout_sender(address, 1)
    follower.connect(address)
    follower.send_multipart([HELLO, WORD.pack(0)])
    leader.connect(soon())
    follower.send(bytes(fanout.LARGEST + 1))
    time.sleep(0.3)

    with pytest.raises(PeerLost):
        leader.send_many(FRAMES[:1], soon())


NONSENSE = [
    [b"nonsense"],
    [b""],
    [b"two", b"parts"],
    [b"of", b"four", b"parts", b""],
    [bytes(16)],
    [bytes(16), b"frame"],
    [HELLO, WORD.pack(0)],
    [bytes(1 << 20)],
]
WORDS = [None, (b"-", b"-"), (b"somebody", pipe.PROTOCOL), (NAME, b"tpserve"), (b"somebody", fanout.PROTOCOL)]


@contextmanager
def nonsense(address: str, *words: tuple[bytes, bytes] | None) -> Iterator[None]:
    """Strangers who say all of that, after a name and a password that are not ours; and stay."""
    with zmq.Context() as context, ExitStack() as guests:
        for greeting, parts in product(words or WORDS, NONSENSE):
            guest = guests.enter_context(context.socket(zmq.DEALER))
            guest.linger = 0
            if greeting is not None:
                guest.plain_username, guest.plain_password = greeting
            guest.connect(address)
            with suppress(zmq.Again):  # it was turned away already
                guest.send_multipart(parts, zmq.DONTWAIT)
        time.sleep(0.2)
        yield


@pytest.mark.parametrize("patience", [0.0, 1.0])
def test_strangers_with_sockets_of_zmq_make_no_receiver_fail(
    transport: ZmqTransport, address: str, patience: float
) -> None:
    receiver = transport.pipe_receiver(address)
    with nonsense(address):
        assert receiver.recv_many(10, 1 << 20, patience and time.monotonic() + patience) == []
        sender = transport.pipe_sender(address)
        sender.connect(soon())
        for number in range(3):
            sender.send(b"%d" % number, soon())
            with nonsense(address, None):
                assert receiver.recv_many(10, 1 << 20, soon()) == [b"%d" % number]


def test_strangers_with_sockets_of_zmq_hold_no_follower_up(transport: ZmqTransport, address: str) -> None:
    """They come before the join, meanwhile, and when frames are under way and the window is full."""
    leader = transport.fanout_sender(address, 2)
    leading = Task(leader.connect, soon())
    followers = [transport.fanout_receiver(address, number, 2) for number in range(2)]
    with nonsense(address):
        joining = [Task(followers[0].connect, soon())]
        with nonsense(address, None):
            joining.append(Task(followers[1].connect, soon()))
            for task in (leading, *joining):
                task.result()
        sending = Task(leader.send_many, FRAMES, soon())
        with nonsense(address, None):
            reading = [Task(end.recv_many, len(FRAMES), soon()) for end in followers]
            assert [task.result() for task in reading] == [FRAMES] * 2
        sending.result()


@pytest.mark.parametrize("end", ["fanout_sender", "pipe_receiver"])
def test_a_stranger_takes_no_memory(transport: ZmqTransport, stranger: Any, address: str, end: str) -> None:
    """What it sends stays with it: four messages, which is what its own queue holds."""
    made = getattr(transport, end)(address, *([1] if end == "fanout_sender" else []))
    stranger.sndhwm = 4
    stranger.connect(address)
    stranger.sndtimeo = 300
    sent = 0
    with suppress(zmq.Again):
        while sent < 100:
            stranger.send(bytes(1 << 10))
            sent += 1
    assert sent <= 4
    made.close()


def test_who_is_cut_off_again_and_again_can_be_closed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time is an event of which nobody reads, and zmq would keep 2,000 and then wait."""
    monkeypatch.setattr(sockets, "RECONNECT", 1)
    with zmq.Context[zmq.SyncSocket]() as context, context.socket(zmq.ROUTER) as unguarded:
        require(unguarded, fanout.PROTOCOL)
        unguarded.bind(address)
        transport = ZmqTransport(ZmqOptions())
        follower = transport.fanout_receiver(address, 0, 1)
        assert isinstance(follower, fanout.ZmqFanoutReceiver)
        time.sleep(6)
        closing = Thread(target=transport.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
