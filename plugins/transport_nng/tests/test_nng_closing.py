"""Ends that are closed at any moment, by whichever thread: nng itself would leave connections open, or panic."""

from __future__ import annotations

import itertools
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pynng
import pytest

from tpserve.api import Closed, DeadlineExceeded, PeerLost
from tpserve.api.flow import WORD
from tpserve.testing.lab import Task, leaks_files
from tpserve_transport_nng import sockets
from tpserve_transport_nng.calls import LONGEST, Calls
from tpserve_transport_nng.connections import connected
from tpserve_transport_nng.door import OpenDoor
from tpserve_transport_nng.plugin import NngOptions
from tpserve_transport_nng.sockets import FILLER, ManySocket, Message, PairSocket
from tpserve_transport_nng.transport import NngTransport
from tpserve_transport_nng.words import OF_SENDER

ROUNDS = 4
SPEAKS_NNG = b"\0SP\0\0\x11\0\0"
"""What a Pair1 says first."""


class Link(NamedTuple):
    """Both ends of one, whatever its kind."""

    send: Callable[[bytes, float], None]
    close: Callable[[], None]
    receive: Callable[[float], list[bytes]]


@pytest.fixture(params=["ipc", "tcp"])
def addresses(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A new one each time."""

    def made() -> Iterator[str]:
        for number in itertools.count():
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            yield f"ipc://{tmp_path}/{number}" if request.param == "ipc" else f"tcp://127.0.0.1:{port}"

    return made()


def soon() -> float:
    return time.monotonic() + 15


def until_it_ends(call: Callable[[], object]) -> None:
    """Call again and again, until this end or the other is closed."""
    with suppress(Closed, PeerLost):
        while True:
            call()


def repeatedly(use: Callable[[], None]) -> None:
    for _ in range(ROUNDS):
        use()


@pytest.mark.parametrize("order", ["receiver first", "senders first", "twice at once"])
def test_closing_a_pipe_that_is_in_use_leaves_nothing_open(addresses: Iterator[str], order: str) -> None:
    """Whether its senders are connecting or sending."""
    draws = random.Random(0)

    def use() -> None:
        with closing(NngTransport(NngOptions(linger=0))) as transport:
            address = next(addresses)
            receiver = transport.pipe_receiver(address)
            senders = [transport.pipe_sender(address) for _ in range(3)]

            def send(sender: Any) -> None:
                time.sleep(draws.random() / 100)
                sender.connect(soon())
                until_it_ends(lambda: sender.send(b"-" * 100_000, soon()))

            tasks = [Task(until_it_ends, lambda: receiver.recv_many(100, 1 << 20, soon()))]
            tasks += [Task(until_it_ends, lambda sender=sender: send(sender)) for sender in senders]
            time.sleep(draws.random() / 20)
            ends = {"receiver first": [receiver, *senders], "senders first": [*senders, receiver]}
            for end in ends.get(order, []):
                end.close()
                time.sleep(draws.random() / 50)
            tasks += [Task(end.close) for end in (receiver, *senders) * 2]
            for task in tasks:
                task.result()

    assert not leaks_files(lambda: repeatedly(use))


def test_connections_that_are_given_together_are_all_met() -> None:
    """nng mixes up those that wait at one listener."""
    many = ManySocket("ipc:///link")
    ends = [socket.socketpair() for _ in range(16)]
    pairs = [PairSocket(pynng.Pair1(), "ipc:///link", f"the peer of {number}") for number in range(len(ends))]
    for here, _ in ends:
        many.adopt(here)
    for pair, (_, there) in zip(pairs, ends, strict=True):
        pair.adopt(there)
    for number, pair in enumerate(pairs):
        pair.meet(soon())
        pair.send(b"%d" % number, soon())
    came = [many.receive_message(soon()) for _ in pairs]
    assert {message.data for message in came if message} == {b"%d" % number for number in range(len(ends))}
    for end in (*pairs, many):
        end.close()


class Watched:
    """A socket of nng's that notes whether it was closed while a call was under way, or used afterwards."""

    def __init__(self) -> None:
        self.is_misused = False
        self.called = Event()
        self._calls = 0
        self._is_closed = False

    def close(self) -> None:
        self.is_misused |= self._calls > 0
        self._is_closed = True

    def call(self, *_: object) -> object:
        self._calls += 1
        self.called.set()
        self.is_misused |= self._is_closed
        time.sleep(0.05)
        self.is_misused |= self._is_closed
        self._calls -= 1
        raise pynng.Timeout("", 5)

    send = call


@pytest.mark.parametrize("call", ["receive_message", "send"])
def test_no_call_is_under_way_when_a_socket_is_closed(call: str) -> None:
    """nng frees what it uses."""
    pair = PairSocket(pynng.Pair0(), "ipc:///link", "the peer")
    pair._socket.close()
    watched = Watched()
    pair._socket, pair._receive = watched, watched.call  # type: ignore[method-assign, assignment]
    arguments = [soon()] if call == "receive_message" else [b"frame", soon()]
    tasks = [Task(until_it_ends, lambda: getattr(pair, call)(*arguments)) for _ in range(2)]
    assert watched.called.wait(5)
    pair.close()
    for task in tasks:
        task.result()
    assert not watched.is_misused


def test_a_call_that_a_signal_broke_off_does_not_hold_up_a_close() -> None:
    """Its exception may come before it is noted that the call has ended."""
    pair = PairSocket(pynng.Pair0(), "ipc:///link", "the peer")
    pair._calls.__enter__()
    Task(pair.close).result(10)


def test_closing_a_receiver_at_the_instant_of_a_handshake_leaves_nothing_open(addresses: Iterator[str]) -> None:
    def use() -> None:
        with closing(NngTransport(NngOptions(linger=0))) as transport:
            address = next(addresses)
            receiver = transport.pipe_receiver(address)
            with connected_to(address) as end:
                end.sendall(OF_SENDER.greeting)
                assert end.recv(len(OF_SENDER.answer)) == OF_SENDER.answer
                end.sendall(SPEAKS_NNG)
                receiver.close()

    assert not leaks_files(lambda: repeatedly(use))


def connected_to(address: str) -> socket.socket:
    end = connected(address, soon())
    assert end is not None
    return end


@contextmanager
def sent_to_a_stub(address: str) -> Iterator[tuple[Any, ManySocket]]:
    """A sender's end, and what a receiver has, to answer as it likes."""
    with (
        closing(NngTransport(NngOptions(send_buffer=1000, linger=30))) as transport,
        closing(ManySocket(address)) as host,
        closing(OpenDoor(address, OF_SENDER, host.adopt)),
    ):
        sender = transport.pipe_sender(address)
        sender.connect(soon())
        yield sender, host


def answered(host: ManySocket) -> Message:
    """Take a message, and return its mark."""
    message = taken(host)
    host.answer(message, message.data[: WORD.size])
    return message


def taken(host: ManySocket) -> Message:
    """The next message that means something."""
    deadline = soon()
    while time.monotonic() < deadline:
        message = host.receive_message(deadline)
        if message is not None and message.data != FILLER:
            return message
    raise AssertionError("nothing came")


class Counted:
    """nng's functions, and how many messages there are that somebody has to free."""

    def __init__(self) -> None:
        self.ours = 0
        self.has_room = True

    def __getattr__(self, name: str) -> Any:
        return getattr(pynng.lib, name)

    def nng_msg_alloc(self, *arguments: Any) -> int:
        self.ours += 1
        return int(pynng.lib.nng_msg_alloc(*arguments))

    def nng_recvmsg(self, *arguments: Any) -> int:
        code = int(pynng.lib.nng_recvmsg(*arguments))
        self.ours += code == 0
        return code

    def nng_sendmsg(self, *arguments: Any) -> int:
        code = int(pynng.lib.nng_sendmsg(*arguments)) if self.has_room else int(pynng.lib.NNG_EAGAIN)
        self.ours -= code == 0
        return code

    def nng_msg_free(self, message: Any) -> None:
        self.ours -= 1
        pynng.lib.nng_msg_free(message)


def test_every_message_of_nng_is_freed(addresses: Iterator[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were taken, and those that could not be sent."""
    with sent_to_a_stub(next(addresses)) as (sender, host), monkeypatch.context() as patch:
        counted = Counted()
        patch.setattr(sockets, "lib", counted)
        sender.send(bytes(400), soon())
        message = answered(host)
        counted.has_room = False
        host.answer(message, message.data[: WORD.size])
        assert counted.ours == 0


def test_connections_that_have_gone_leave_nothing_behind(addresses: Iterator[str]) -> None:
    """Each had a listener of its own."""
    with sent_to_a_stub(next(addresses)) as (_, host):
        for _ in range(10):
            here, there = socket.socketpair()
            with closing(PairSocket(pynng.Pair1(), host.address, "the receiver")) as pair:
                host.adopt(here)
                pair.adopt(there)
                pair.meet(soon())
            deadline = soon()
            while not host._unused and time.monotonic() < deadline:
                time.sleep(0.01)
            assert host._unused
        assert len(host._socket.listeners) <= 2  # the sender's, and the last that has gone


def test_a_call_that_came_too_late_is_not_waited_for() -> None:
    """By who closes again."""
    calls = Calls()
    calls.end()
    with pytest.raises(Closed), calls:
        pass
    Task(calls.end).result(LONGEST / 2)


def test_the_last_mark_settles_those_before(addresses: Iterator[str]) -> None:
    with sent_to_a_stub(next(addresses)) as (sender, host):
        for size in (400, 400, 0):  # the last has none
            sender.send(bytes(size), soon())
        taken(host)
        answered(host)
        time.sleep(0.2)
        Task(sender.close).result(10)


def test_a_mark_that_was_asked_for_twice_is_owed_twice(addresses: Iterator[str]) -> None:
    """Who answers a sender that has gone reads no more: here, the frame without a mark."""
    with sent_to_a_stub(next(addresses)) as (sender, host):
        sender.send(bytes(800), soon())
        with pytest.raises(DeadlineExceeded):
            sender.send(bytes(800), 0)
        sender.send(b"", soon())
        answered(host)
        ending = Task(sender.close)
        time.sleep(0.5)
        assert not ending.is_done
        for _ in range(3):  # the question, the frame, and the question for all
            last = taken(host)
        host.answer(last, last.data[: WORD.size])
        ending.result(10)


def test_marks_with_nothing_behind_them_are_not_waited_for(addresses: Iterator[str]) -> None:
    """Who answers them loses nothing, and may not look: it has all frames."""
    with sent_to_a_stub(next(addresses)) as (sender, _):
        sender.send(bytes(800), soon())
        with pytest.raises(DeadlineExceeded):
            sender.send(bytes(800), 0)
        Task(sender.close).result(10)


def test_a_mark_that_was_dropped_is_asked_for_again(addresses: Iterator[str]) -> None:
    with sent_to_a_stub(next(addresses)) as (sender, host):
        for size in (400, 0):
            sender.send(bytes(size), soon())
        ending = Task(sender.close)
        for _ in range(2):
            taken(host)
        answered(host)
        ending.result(10)


def test_marks_that_were_dropped_do_not_hold_up_a_close(addresses: Iterator[str]) -> None:
    """A receiver cannot send a sender as many at once as that has asked for."""
    with closing(NngTransport(NngOptions(send_buffer=1000, linger=30))) as transport:
        address = next(addresses)
        receiver, sender = transport.pipe_receiver(address), transport.pipe_sender(address)
        sender.connect(soon())
        sender.send(bytes(1000), soon())
        for _ in range(50):
            with pytest.raises(DeadlineExceeded):
                sender.send(bytes(1000), 0)
        time.sleep(0.2)
        assert len(receiver.recv_many(1, 1, soon())) == 1
        reading = Task(receiver.recv_many, 1, 1, time.monotonic() + 3)
        Task(sender.close).result(10)
        assert reading.result() == []


@pytest.fixture(params=["pipe", "fan-out"])
def link(request: pytest.FixtureRequest, addresses: Iterator[str]) -> Iterator[Link]:
    """With a window of 20,000 bytes, and a sender that closes patiently."""
    with linked(request.param, next(addresses), linger=30) as made:
        yield made


@contextmanager
def linked(kind: str, address: str, linger: float) -> Iterator[Link]:
    with closing(NngTransport(NngOptions(send_buffer=20_000, linger=linger))) as transport:
        if kind == "pipe":
            receiver, sender = transport.pipe_receiver(address), transport.pipe_sender(address)
            sender.connect(soon())
            yield Link(sender.send, sender.close, lambda deadline: receiver.recv_many(1, 1, deadline))
        else:
            leader, follower = transport.fanout_sender(address, 1), transport.fanout_receiver(address, 0, 1)
            joining = Task(follower.connect, soon())
            leader.connect(soon())
            joining.result()

            def receive(deadline: float) -> list[bytes]:
                with suppress(PeerLost, DeadlineExceeded):
                    return follower.recv_many(1, deadline)
                return []

            yield Link(lambda frame, deadline: leader.send_many([frame], deadline), leader.close, receive)


def test_no_send_begins_while_a_sender_closes(link: Link) -> None:
    """Nor does one that waits go on; and what was accepted before arrives."""
    link.send(bytes(5000), soon())
    link.send(b"behind its mark", soon())
    ending = Task(link.close)
    time.sleep(0.3)
    assert not ending.is_done
    with pytest.raises(Closed):
        link.send(b"late", soon())
    assert link.receive(soon()) + link.receive(soon()) == [bytes(5000), b"behind its mark"]
    ending.result(10)
    assert link.receive(time.monotonic() + 0.5) == []


@pytest.mark.parametrize("kind", ["pipe", "fan-out"])
def test_a_signal_may_close_what_it_interrupts(kind: str, addresses: Iterator[str]) -> None:
    """In the thread that sends: nobody could end that call meanwhile."""
    took = []
    with linked(kind, next(addresses), linger=0) as link:

        def close(*_: object) -> None:
            begun = time.monotonic()
            link.close()
            took.append(time.monotonic() - begun)

        before = signal.signal(signal.SIGALRM, close)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            until_it_ends(lambda: link.send(bytes(5000), soon()))
        finally:
            signal.signal(signal.SIGALRM, before)
    assert took[0] < LONGEST / 2
