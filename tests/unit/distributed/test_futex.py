import ctypes
import time

import pytest

from tpserve.distributed import futex
from tpserve.testing.lab import Task


@pytest.fixture
def word():
    return ctypes.c_uint32(7)


def test_a_sleeper_is_woken(word):
    address = ctypes.addressof(word)
    sleeping = Task(futex.wait, address, 7, 60.0)
    while not sleeping.is_done:
        futex.wake(address)
        time.sleep(0.001)


def test_nobody_sleeps_on_a_word_that_has_changed(word):
    Task(futex.wait, ctypes.addressof(word), 8, 60.0).result()


def test_a_sleeper_wakes_at_its_timeout(word):
    begun = time.monotonic()
    futex.wait(ctypes.addressof(word), 7, 0.05)
    assert time.monotonic() >= begun + 0.05


def test_the_probe_knows_where_it_works(monkeypatch):
    assert futex.probe() is None
    monkeypatch.setattr("platform.machine", lambda: "mips")
    assert futex.probe() == "needs Linux on x86_64 or aarch64, and this is linux on mips"
