"""A connection that breaks while the processes at its ends live: what comes after what was lost is not delivered."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tpserve.api import FrameError, PeerLost, PipeReceiver, Transport
from tpserve.testing.lab import Task
from tpserve_transport_nng.plugin import NngOptions
from tpserve_transport_nng.transport import NngTransport
from tpserve_transport_zmq.plugin import ZmqOptions
from tpserve_transport_zmq.transport import ZmqTransport

PATIENCE = 60.0
LARGE = 4 << 20
RECONNECTED = 0.3
"""Seconds in which both libraries would have connected again."""

Send = Callable[[bytes], None]
Receive = Callable[[], list[bytes]]


@pytest.fixture(params=["zmq", "nng"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    """A transport for the sending end and one for the receiving."""
    made = [ZmqTransport(ZmqOptions(linger=0.1)) if request.param == "zmq" else NngTransport(NngOptions(linger=0.1))]
    made.append(type(made[0])(made[0].options))
    yield made[0], made[1]
    for transport in reversed(made):
        transport.close()


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "ipc":
        return f"ipc://{tmp_path / 'end'}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_of_a_fanout(ends: tuple[Transport, Transport], address: str) -> None:
    with breakable() as break_all:
        leader, follower = ends[0].fanout_sender(address, 1), ends[1].fanout_receiver(address, 0, 1)
        connecting = Task(lambda: follower.connect(soon()))
        leader.connect(soon())
        connecting.result()
        check(lambda frame: leader.send_many([frame], soon()), lambda: follower.recv_many(1, soon()), break_all)


def test_of_a_pipe(ends: tuple[Transport, Transport], address: str) -> None:
    with breakable() as break_all:
        receiver, sender = ends[1].pipe_receiver(address), ends[0].pipe_sender(address)
        sender.connect(soon())
        check(lambda frame: sender.send(frame, soon()), lambda: receive_some(receiver), break_all)


def check(send: Send, receive: Receive, break_all: Callable[[], None]) -> None:
    """Break it while much is under way, let it be mended, and send on."""
    for number in range(6):
        send(number.to_bytes(8, "little").ljust(LARGE, b"-"))
    break_all()
    time.sleep(RECONNECTED)
    with pytest.raises(PeerLost):
        send_on(send)
    came: list[int] = []
    with suppress(FrameError, PeerLost):
        while frames := receive():
            came += [int.from_bytes(frame[:8], "little") for frame in frames]

    assert came == list(range(len(came)))


def send_on(send: Send) -> None:
    for number in range(6, 100):
        send(number.to_bytes(8, "little"))


def receive_some(receiver: PipeReceiver) -> list[bytes]:
    return receiver.recv_many(8, 1 << 30, time.monotonic() + 1)


@contextmanager
def breakable() -> Iterator[Callable[[], None]]:
    """Yields what shuts down all connections that were made meanwhile."""
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 names are wanted

    def break_all() -> None:
        for name in set(os.listdir("/proc/self/fd")) - before:  # noqa: PTH208
            with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
                found.getpeername()
                found.shutdown(socket.SHUT_RDWR)

    yield break_all


def soon() -> float:
    return time.monotonic() + PATIENCE
