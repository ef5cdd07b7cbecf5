"""What the contracts of links say of a part that breaks them, a person understands."""

from __future__ import annotations

import threading
import time

import pytest

from tpserve.api import PeerLost
from tpserve.testing.doors import undisturbed
from tpserve.testing.lab import Task, asleep


def test_a_call_that_hangs_is_named() -> None:
    event = threading.Event()
    task = Task(event.wait, 60)
    with pytest.raises(AssertionError, match=r"^Event.wait has not ended 0 s later: a call must end at its deadline"):
        task.result(0.01)
    event.set()
    assert task.result()


def test_who_lets_strangers_in_is_told_so() -> None:
    with pytest.raises(AssertionError, match=r"with strangers about, .* fails \(PeerLost: it left\)"), undisturbed():
        raise PeerLost("it left")


def test_a_wait_that_looks_again_and_again_is_found() -> None:
    with asleep():
        time.sleep(0.2)
    with pytest.raises(AssertionError, match=r"wakes the process up \d+ times: something polls"), asleep():
        look_often()


def look_often() -> None:
    for _ in range(300):
        time.sleep(0.0005)
