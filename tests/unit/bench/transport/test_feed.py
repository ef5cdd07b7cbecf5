"""The leader's intake: what it hands out, and when it says that this arrived."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tpserve.bench.transport.board import Board
from tpserve.bench.transport.feed import Feed
from tpserve.errors import DeadlineExceeded

FAR = 1 << 40


def test_what_is_offered_arrives_when_it_is_asked_for() -> None:
    feed = Feed()
    feed.offer([b"aa", b"b", b"c"])
    before = time.monotonic_ns()

    assert feed.recv_many(2, FAR, 0) == [b"aa", b"b"]
    assert feed.recv_many(2, FAR, 0) == [b"c"]
    assert feed.recv_many(2, FAR, 0) == []
    assert list(feed.arrivals) == sorted(feed.arrivals)
    assert before <= feed.arrivals[0] <= feed.arrivals[2] <= feed.taken_at <= time.monotonic_ns()
    assert feed.bytes == 4


def test_a_round_s_bytes_are_capped() -> None:
    feed = Feed()
    feed.offer([b"aaaa", b"bbbb", b"cccc"])

    assert feed.recv_many(9, 5, 0) == [b"aaaa", b"bbbb"]


def test_what_came_while_nobody_asked_arrived_when_it_was_due() -> None:
    feed = Feed()
    due = time.monotonic_ns() - 5_000_000
    feed.offer_at([(due, b"early"), (due + 1, b"too")])

    assert feed.recv_many(9, FAR, time.monotonic() + 5) == [b"early", b"too"]
    assert list(feed.arrivals) == [due, due + 1]


def test_what_is_slept_for_arrives_when_the_sleeper_wakes() -> None:
    feed = Feed()
    due = time.monotonic_ns() + 1_000_000_000
    feed.offer_at([(due, b"late")])

    assert feed.recv_many(9, FAR, 0) == []
    assert feed.recv_many(9, FAR, time.monotonic() + 0.005) == []
    assert feed.recv_many(9, FAR, time.monotonic() + 60) == [b"late"]
    assert feed.arrivals[0] == feed.taken_at >= due


def test_a_board_waits_for_the_others() -> None:
    descriptor = Board.create(3)
    boards = [Board(descriptor, 3, rank) for rank in range(3)]
    os.close(descriptor)
    boards[0].advance()
    boards[1].advance()
    with pytest.raises(DeadlineExceeded, match="rank 2 has not come to step 1"):
        boards[0].await_others(time.monotonic() + 0.05)

    threading.Timer(0.05, boards[2].advance).start()
    boards[0].await_others(time.monotonic() + 60)
    boards[1].await_others(time.monotonic() + 60)
    for board in boards:
        board.close()
