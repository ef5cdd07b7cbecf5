import os

import pytest

from tpserve.api import Announcement, FrameError
from tpserve.sync.ring import LINE, SLOTS, Ring
from tpserve.testing.lab import Task


def said(number: int) -> Announcement:
    return Announcement(number, 2 * number, 2, number - 1, -number)


@pytest.fixture
def rings():
    """The writer's view and a view for each of two readers."""
    descriptor = Ring.create(2)
    views = [Ring(descriptor, 2) for _ in range(3)]
    os.close(descriptor)
    yield views
    for view in views:
        view.close()
        view.close()


def test_every_reader_reads_everything_once(rings):
    writer, *readers = rings
    for number in range(3 * SLOTS):
        writer.write(said(number))
        assert [ring.read(reader) for reader, ring in enumerate(readers)] == [said(number)] * 2
    assert [ring.read(reader) for reader, ring in enumerate(readers)] == [None] * 2


def test_the_slowest_reader_bounds_the_writer(rings):
    writer, first, second = rings
    for number in range(SLOTS):
        assert not writer.is_full()
        writer.write(said(number))
        first.read(0)
    assert writer.is_full()
    assert second.read(1) == said(0)
    assert not writer.is_full()


def test_waiting_ends_when_there_is_something(rings):
    writer, first, second = rings
    waiting = [
        Task(ring.wait, reader, spin, 60.0) for reader, (ring, spin) in enumerate([(first, 0.0), (second, 60.0)])
    ]
    writer.write(said(0))
    writer.wake()
    assert [task.result() for task in waiting] == [True, True]
    assert first.wait(0, 0.0, 60.0)


def test_waiting_ends_with_the_timeout(rings):
    _, first, _ = rings
    assert not first.wait(0, 0.0, 0.01)
    assert not first.wait(0, 0.01, 0.0)


def test_what_stays_damaged_is_an_error(rings):
    writer, first, _ = rings
    writer.write(said(0))
    first._memory[LINE * 3 + 20] ^= 1
    with pytest.raises(FrameError, match="damaged"):
        first.read(0)


def test_what_another_core_sees_late_is_read_when_it_is_there(rings):
    writer, first, _ = rings
    writer.write(said(0))
    slot = slice(LINE * 3, LINE * 4)
    late = bytes(first._memory[slot])
    first._memory[slot] = bytes(LINE)
    reading = Task(first.read, 0)
    writer._memory[slot] = late
    assert reading.result() == said(0)


def test_nothing_has_a_name():
    descriptor = Ring.create(1)
    try:
        assert os.fstat(descriptor).st_nlink == 0
    finally:
        os.close(descriptor)
