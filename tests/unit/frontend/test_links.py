from __future__ import annotations

import math
from queue import SimpleQueue
from threading import Event

from tpserve.api import PipeReceiver, PipeSender
from tpserve.envelope import Opener, Sealer
from tpserve.errors import Closed, DeadlineExceeded
from tpserve.frontend.control import Links
from tpserve.frontend.links import Connection
from tpserve.messages import Abort, ApiMessage, Rejected, Shutdown, decode_tokenizer, encode
from tpserve.testing.fake_server import make_pipe


class Stuck(PipeSender):
    """Its receiver reads nothing."""

    def __init__(self) -> None:
        self.waits = Event()
        self.closed = Event()

    def connect(self, deadline: float) -> None:
        pass

    def send(self, frame: bytes, deadline: float) -> None:
        self.waits.set()
        self.closed.wait()
        raise Closed("the pipe was closed")

    def close(self) -> None:
        self.closed.set()


class Absent(Stuck):
    """Its receiver does not come."""

    def connect(self, deadline: float) -> None:
        raise DeadlineExceeded("no receiver came")


def connect(
    receiver: PipeReceiver, *senders: PipeSender
) -> tuple[Connection, SimpleQueue[list[ApiMessage]], SimpleQueue[str]]:
    delivered: SimpleQueue[list[ApiMessage]] = SimpleQueue()
    lost: SimpleQueue[str] = SimpleQueue()
    return Connection(Links(receiver, senders), math.inf, delivered.put, lost.put), delivered, lost


def test_all_messages_of_a_request_go_to_one_tokenizer_in_order() -> None:
    pipes = [make_pipe() for _ in range(3)]
    connection, _, lost = connect(make_pipe()[1], *(sender for sender, _ in pipes))
    for uid in (3, 4, 7, 3, 5):
        connection.send(uid, encode(Abort(uid)))
    connection.send_all(encode(Shutdown()))
    connection.close(30.0)
    received = []
    for _, receiver in pipes:
        opener = Opener()
        received.append([decode_tokenizer(opener.open(frame)) for frame in receiver.recv_many(10, 1 << 20, 0)])
    assert received == [
        [Abort(3), Abort(3), Shutdown()],
        [Abort(4), Abort(7), Shutdown()],
        [Abort(5), Shutdown()],
    ]
    assert lost.empty()


def test_sending_never_waits_and_closing_gives_up_on_what_cannot_be_sent() -> None:
    stuck = Stuck()
    connection, _, lost = connect(make_pipe()[1], stuck)
    for uid in range(100):
        connection.send(uid, encode(Abort(uid)))
    assert stuck.waits.wait(30.0)
    assert connection.backlog == 99
    connection.close(0.0)
    assert stuck.closed.is_set()
    assert lost.empty()


def test_what_comes_is_delivered() -> None:
    inbox, receiver = make_pipe()
    connection, delivered, _ = connect(receiver, Stuck())
    first, second = Sealer(1), Sealer(2000)
    inbox.send(first.seal(encode(Rejected(1, "no"))), math.inf)
    inbox.send(second.seal(encode(Rejected(2, "no"))), math.inf)
    found: list[ApiMessage] = []
    while len(found) < 2:
        found += delivered.get(timeout=30)
    assert found == [Rejected(1, "no"), Rejected(2, "no")]
    connection.close(0.0)


def test_a_tokenizer_that_cannot_be_reached_is_a_loss() -> None:
    connection, _, lost = connect(make_pipe()[1], Absent())
    assert lost.get(timeout=30) == "the link to a tokenizer failed: no receiver came"
    connection.close(0.0)


def test_a_frame_out_of_order_is_a_loss() -> None:
    inbox, receiver = make_pipe()
    connection, _, lost = connect(receiver, Stuck())
    sealer = Sealer(2000)
    sealer.seal(b"lost on the way")
    inbox.send(sealer.seal(encode(Rejected(1, "no"))), math.inf)
    assert "expected frame 0, found frame 1" in lost.get(timeout=30)
    connection.close(0.0)


def test_a_message_that_is_none_is_a_loss() -> None:
    inbox, receiver = make_pipe()
    connection, _, lost = connect(receiver, Stuck())
    inbox.send(Sealer(2000).seal(b"\xc1"), math.inf)
    assert "the link from the detokenizers failed" in lost.get(timeout=30)
    connection.close(0.0)
