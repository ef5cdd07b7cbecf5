"""Strangers make nobody fail; what an end of our own says wrongly is an error, and never one that nobody expects."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pynng
import pytest

from tpserve.api import Closed, DeadlineExceeded, FrameError, PeerLost
from tpserve.api.flow import WORD
from tpserve.testing.lab import Task
from tpserve_transport_nng.calls import LONGEST
from tpserve_transport_nng.connections import Listener
from tpserve_transport_nng.door import Door, OpenDoor
from tpserve_transport_nng.fanout import LARGE, LARGEST
from tpserve_transport_nng.pipe import PREFIX
from tpserve_transport_nng.plugin import NngOptions
from tpserve_transport_nng.sockets import FILLER, ManySocket, PairSocket
from tpserve_transport_nng.transport import NngTransport
from tpserve_transport_nng.visit import Visit
from tpserve_transport_nng.words import OF_SENDER, of_follower

FRAMES = [b"-" * 400] * 8
NONSENSE = [b"nonsense", b"", bytes(16), bytes(9) + b"frame", PREFIX.pack(0, True) + b"frame", bytes(1 << 20)]
SPEAKS_NNG = b"\0SP\0\0\x11\0\0"
"""What a Pair1 says first."""

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
def nonsense(port: int, *greetings: bytes) -> Iterator[None]:
    """Strangers who say all of that, after one of the greetings; and stay, or leave at once."""
    with ExitStack() as guests:
        for greeting, words, stays in itertools.product(greetings, NONSENSE, [True, False]):
            guest = guests.enter_context(socket.create_connection(("127.0.0.1", port)))
            with suppress(ConnectionError):  # it was turned away already
                guest.sendall(greeting + words)
            if not stays:
                guest.close()
        time.sleep(0.2)
        yield


@contextmanager
def received(address: str) -> Iterator[ManySocket]:
    """What a receiver has, to say what it likes."""
    with closing(ManySocket(address)) as host, closing(OpenDoor(address, OF_SENDER, host.adopt)):
        yield host


@contextmanager
def led(transport: NngTransport, address: str, followers: int = 1) -> Iterator[Any]:
    """A leader, and sockets that have joined as followers do, say what they like and hold one message unread."""

    def join(pair: PairSocket, number: int) -> None:
        with Visit(address, of_follower(number, followers), pair.check_open).meeting(soon()) as end:
            pair.adopt(end)
        pair.meet(soon())

    with ExitStack() as stack:
        leader = transport.fanout_sender(address, followers)
        pairs = []
        for _ in range(followers):
            pair = pynng.Pair0()
            pairs.append(stack.enter_context(closing(PairSocket(pair, address, "the leader"))))
            pair.recv_buffer_size = 1
        joining = [Task(join, pair, number) for number, pair in enumerate(pairs)]
        leader.connect(soon())
        for task in joining:
            task.result()
        yield leader, *pairs


def test_a_follower_that_says_too_much_is_cut_off(transport: NngTransport, port: int) -> None:
    with led(transport, f"tcp://127.0.0.1:{port}") as (leader, follower):
        follower.send(bytes(LARGEST + 1), soon())
        time.sleep(0.3)

        with pytest.raises(PeerLost):
            leader.send_many(FRAMES[:1], soon())


@pytest.mark.parametrize("mark", NO_MARKS)
def test_a_leader_takes_marks_only(transport: NngTransport, port: int, mark: bytes) -> None:
    with led(transport, f"tcp://127.0.0.1:{port}") as (leader, follower):
        follower.send(mark, soon())

        with pytest.raises(FrameError):
            leader.send_many(FRAMES, soon())


@pytest.mark.parametrize("packet", [b"", b"1234567", WORD.pack(8) + b"1", WORD.pack(16) + WORD.pack(0) * 2 + b"x"])
def test_a_follower_takes_packets_only(transport: NngTransport, port: int, packet: bytes) -> None:
    address = f"tcp://127.0.0.1:{port}"
    follower = transport.fanout_receiver(address, 0, 1)
    connecting = Task(follower.connect, soon())
    with closing(Door(address, 1)) as door, closing(PairSocket(pynng.Pair0(), address, "the follower")) as leader:
        with door.meeting(soon()) as (end,):
            end.sendall(of_follower(0, 1).answer)
            leader.adopt(end)
        connecting.result()
        leader.send(packet, soon())

        with pytest.raises(FrameError):
            follower.recv_many(1, soon())


@pytest.mark.parametrize("mark", NO_MARKS)
def test_a_sender_takes_marks_only(transport: NngTransport, port: int, mark: bytes) -> None:
    address = f"tcp://127.0.0.1:{port}"
    with received(address) as host:
        sender = transport.pipe_sender(address)
        sender.connect(soon())
        sender.send(FRAMES[0], soon())
        message = host.receive_message(soon())
        assert message is not None
        host.answer(message, mark)
        sender.send(FRAMES[1], soon())

        with pytest.raises(FrameError):
            sender.send(FRAMES[2], soon())


@pytest.mark.parametrize("message", [b"", b"x", b"12345678"])
def test_a_receiver_takes_messages_only(transport: NngTransport, port: int, message: bytes) -> None:
    """Of who has come through its door."""
    address = f"tcp://127.0.0.1:{port}"
    receiver = transport.pipe_receiver(address)
    with closing(PairSocket(pynng.Pair1(), address, "the receiver")) as sender:
        with Visit(address, OF_SENDER, sender.check_open).meeting(soon()) as end:
            sender.adopt(end)
        sender.meet(soon())
        sender.send(message, soon())

        with pytest.raises(FrameError):
            receiver.recv_many(1, 1000, soon())


@pytest.mark.parametrize("patience", [0.0, 0.5])
@pytest.mark.parametrize("greetings", [[b"", SPEAKS_NNG], [OF_SENDER.greeting]], ids=["none", "a sender's"])
def test_strangers_make_no_receiver_fail(
    transport: NngTransport, port: int, greetings: list[bytes], patience: float
) -> None:
    """Nor do those who come through the door, and do not speak nng then."""
    address = f"tcp://127.0.0.1:{port}"
    receiver = transport.pipe_receiver(address)
    with nonsense(port, *greetings):
        assert receiver.recv_many(10, 1 << 20, patience and time.monotonic() + patience) == []
        sender = transport.pipe_sender(address)
        sender.connect(soon())
        for number in range(3):
            with nonsense(port, *greetings):
                sender.send(b"%d" % number, soon())
            assert receiver.recv_many(10, 1 << 20, soon()) == [b"%d" % number]


def test_sockets_of_nng_come_through_no_door(transport: NngTransport, port: int) -> None:
    """They speak first, and then wait for somebody who does."""
    receiver = transport.pipe_receiver(f"tcp://127.0.0.1:{port}")
    with pynng.Pair1(send_timeout=500) as stranger:
        stranger.dial(f"tcp://127.0.0.1:{port}", block=False)
        with pytest.raises(pynng.Timeout):
            stranger.send(PREFIX.pack(0, True) + b"frame")
        assert receiver.recv_many(1, 1000, time.monotonic() + 0.1) == []


def test_a_sender_closes_when_it_has_the_marks_that_it_is_owed(port: int) -> None:
    """Who answers it when it has gone reads no more of what it sent."""
    address = f"tcp://127.0.0.1:{port}"
    with received(address) as host, closing(NngTransport(NngOptions(send_buffer=1000))) as transport:
        sender = transport.pipe_sender(address)
        sender.connect(soon())
        for frame in (FRAMES[0], b"behind its mark"):
            sender.send(frame, soon())
        closing_sender = Task(sender.close)
        time.sleep(0.5)
        assert not closing_sender.is_done
        message = host.receive_message(soon())
        assert message is not None
        host.answer(message, message.data[: WORD.size])
        closing_sender.result()


def test_a_leader_closes_when_it_has_the_marks_that_it_is_owed(port: int) -> None:
    transport = NngTransport(NngOptions(send_buffer=1000))
    with closing(transport), led(transport, f"tcp://127.0.0.1:{port}") as (leader, follower):
        for frame in (FRAMES[0], b"behind its mark"):
            leader.send_many([frame], soon())
        closing_leader = Task(leader.close)
        time.sleep(0.5)
        assert not closing_leader.is_done
        message = follower.receive(soon())
        assert message is not None
        follower.send(message[WORD.size : 2 * WORD.size], soon())
        closing_leader.result()


def test_a_leader_that_closes_in_the_middle_of_a_packet_asks_for_nothing(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower would take the question for the rest of it."""
    frame, came = bytes(1 << 18), []
    transport = NngTransport(NngOptions(send_buffer=1 << 20, linger=2))
    with closing(transport), led(transport, f"tcp://127.0.0.1:{port}") as (leader, follower):
        leader.send_many([frame], soon())
        leader.send_many([b""], soon())
        (pair,) = leader._pairs
        send = pair.try_send

        def send_small_ones(data: bytes, deadline: float) -> bool:
            if len(data) > LARGE:  # as if there were no room
                time.sleep(0.1)
                return False
            return bool(send(data, deadline))

        monkeypatch.setattr(pair, "try_send", send_small_ones)
        sending = Task(leader.send_many, [frame], soon())
        time.sleep(0.5)
        ending = Task(leader.close)
        with pytest.raises(Closed):
            sending.result(10)
        while not follower.lost:
            message = follower.receive(soon())
            if message not in (None, FILLER):
                came.append(len(message))
        ending.result()
    start = 3 * WORD.size
    assert came == [start, len(frame), start, start]


def test_a_leader_waits_for_no_mark_of_a_follower_that_has_gone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it stopped in the middle of a packet, and cannot ask."""
    transport = NngTransport(NngOptions(send_buffer=1 << 20, linger=60))
    with closing(transport), led(transport, f"tcp://127.0.0.1:{port}") as (leader, follower):
        leader.send_many([bytes(1 << 18)], soon())
        (pair,) = leader._pairs
        send = pair.try_send

        def send_small_ones(data: bytes, deadline: float) -> bool:
            return len(data) < LARGE and bool(send(data, deadline))

        monkeypatch.setattr(pair, "try_send", send_small_ones)
        with pytest.raises(DeadlineExceeded):
            leader.send_many([bytes(1 << 18)], time.monotonic() + 0.1)
        assert pair.owed
        follower.close()
        Task(leader.close).result(10)


def test_a_sender_that_has_lost_its_receiver_does_not_come_to_the_next(tmp_path: Path, transport: NngTransport) -> None:
    address = f"ipc://{tmp_path}/link"
    sender = transport.pipe_sender(address)
    with received(address):
        sender.connect(soon())
    time.sleep(0.2)
    with pytest.raises(PeerLost):
        sender.send(b"frame", soon())
    with closing(Listener(address)) as listener:
        listener.socket.settimeout(1)
        with pytest.raises(TimeoutError):
            listener.socket.accept()


def test_one_follower_that_stands_still_hides_no_other_that_goes(tmp_path: Path) -> None:
    """The leader waits to write to the first, whose queues are full."""
    transport = NngTransport(NngOptions(linger=0))
    with led(transport, f"ipc://{tmp_path}/link", 2) as (leader, _still, going):
        sending = Task(lambda: [leader.send_many([bytes(1 << 18)], soon()) for _ in range(100)])
        time.sleep(1)
        assert not sending.is_done
        going.close()
        with pytest.raises(PeerLost, match="follower 1 of"):
            sending.result(5)
    transport.close()


@pytest.mark.parametrize("kind", ["pipe", "fan-out"])
def test_closing_ends_a_send_for_which_nng_has_no_room(port: int, kind: str) -> None:
    """Though the window has some: before a close counts the call for none."""
    address, transport = f"tcp://127.0.0.1:{port}", NngTransport(NngOptions(linger=0))
    with ExitStack() as stack:
        stack.enter_context(closing(transport))
        sender: Any
        if kind == "pipe":
            host = stack.enter_context(received(address))
            host._socket.recv_buffer_size = 1
            sender = transport.pipe_sender(address)
            sender.connect(soon())
        else:
            sender, _still = stack.enter_context(led(transport, address))

        def send_on() -> None:
            for _ in range(1000):
                frame = bytes(LARGE - 1000)
                sender.send(frame, soon()) if kind == "pipe" else sender.send_many([frame], soon())

        sending = Task(send_on)
        time.sleep(1)
        assert not sending.is_done
        ending = Task(sender.close)
        with pytest.raises(Closed):
            sending.result(LONGEST / 2)
        ending.result()


def test_closing_ends_a_send_of_several_batches(
    transport: NngTransport, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each finds room."""
    with led(transport, f"tcp://127.0.0.1:{port}") as (leader, _):
        (pair,) = leader._pairs
        send, ending = pair.send_packet, []

        def close_behind(*arguments: Any) -> None:
            send(*arguments)
            ending.append(Task(leader.close))
            while not leader._sends.closed:
                time.sleep(0.01)

        monkeypatch.setattr(pair, "send_packet", close_behind)
        with pytest.raises(Closed):
            leader.send_many([bytes(300), bytes(300)], soon())
        assert len(ending) == 1
        ending[0].result()


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
