"""Ends that are closed at any moment, by whichever thread: nng itself would leave connections open, or panic."""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pynng
import pytest

from tpserve.api import Closed, PeerLost
from tpserve.testing.lab import Task, leaks_files
from tpserve_transport_nng.connections import connected
from tpserve_transport_nng.plugin import NngOptions
from tpserve_transport_nng.sockets import ManySocket, PairSocket
from tpserve_transport_nng.transport import NngTransport
from tpserve_transport_nng.words import OF_SENDER

ROUNDS = 4
SPEAKS_NNG = b"\0SP\0\0\x11\0\0"
"""What a Pair1 says first."""


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
