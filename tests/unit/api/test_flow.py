"""The window of bytes and the packing of frames."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpserve.api import FrameError
from tpserve.api.flow import NO_MARK, WORD, Window, batches, pack, take, unpack

FRAMES = st.lists(st.binary(max_size=40), max_size=30)


@given(FRAMES, st.integers(0, (1 << 64) - 1))
def test_what_is_packed_comes_out(frames, mark):
    assert unpack(*pack(mark, frames)) == (mark, frames)


def test_a_single_frame_is_not_copied():
    frame = b"x" * 100
    header, body = pack(NO_MARK, [frame])
    assert body is frame
    assert unpack(header, body)[1][0] is frame


@pytest.mark.parametrize(
    ("header", "body"),
    [(b"", b""), (b"1234567", b""), (WORD.pack(0) + WORD.pack(3), b"four"), (WORD.pack(0), b"left over")],
)
def test_a_packet_that_contradicts_itself_is_refused(header, body):
    with pytest.raises(FrameError):
        unpack(header, body)


@given(FRAMES, st.integers(1, 100))
def test_batches_lose_nothing_and_keep_their_limit(frames, limit):
    cut = list(batches(frames, limit))
    assert [frame for batch in cut for frame in batch] == frames
    assert all(len(batch) == 1 or sum(map(len, batch)) <= limit for batch in cut)
    assert all(cut)


def test_neighbours_that_fit_go_together():
    assert [len(batch) for batch in batches([b"x" * 10] * 10, 30)] == [3, 3, 3, 1]


def test_a_sender_has_room_until_the_slowest_receiver_is_a_window_behind():
    window = Window(1000, ["slow", "fast"])
    frame = b"x" * (400 - 64)
    for _ in range(2):
        assert window.has_room([frame])
        window.add([frame])
    assert not window.has_room([frame])
    window.returned("fast", 800)
    assert not window.has_room([frame])
    assert window.slowest == "slow"
    window.returned("slow", 400)
    assert window.has_room([frame])


def test_a_frame_larger_than_the_window_passes_alone():
    window = Window(100, ["one"])
    large = [b"x" * 1000]
    assert window.has_room(large)
    mark = window.add(large)
    assert not window.has_room([b""])
    window.returned("one", mark)
    assert window.has_room(large)


def test_empty_frames_count_too():
    window = Window(1000, ["one"])
    sent = 0
    while window.has_room([b""]):
        window.add([b""])
        sent += 1
    assert sent == 1000 // 64


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=50), st.integers(1, 3000))
def test_a_receiver_that_returns_marks_never_lets_the_sender_starve(sizes, size):
    """A waiting sender asks with mark(); what comes back makes room for any frame."""
    window = Window(size, ["one"])
    for length in sizes:
        frames = [b"x" * length]
        if not window.has_room(frames):
            window.returned("one", window.mark())
        assert window.has_room(frames)
        mark = window.add(frames)
        assert mark in (NO_MARK, window.mark())


def test_about_four_marks_are_asked_for_in_a_window():
    window = Window(6400, ["one"])
    marks = [window.add([b"x" * 36]) for _ in range(64)]
    assert [index + 1 for index, mark in enumerate(marks) if mark != NO_MARK] == [16, 32, 48, 64]


def test_marks_may_come_back_late_twice_or_not_at_all():
    window = Window(1000, ["one"])
    first, second = window.add([b"x" * 300]), window.add([b"x" * 300])
    window.returned("one", second)
    window.returned("one", first)
    window.returned("one", second)
    assert window.has_room([b"x" * 900])


@pytest.mark.parametrize(("receiver", "mark"), [("one", 0), ("one", 10_000), ("other", 364)])
def test_a_mark_that_was_never_given_is_refused(receiver, mark):
    window = Window(1000, ["one"])
    window.add([b"x" * 300])
    with pytest.raises(FrameError):
        window.returned(receiver, mark)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_frames_are_taken_from_the_front(count):
    frames = deque([b"a", b"b", b"c"])
    assert take(frames, count) == [b"a", b"b", b"c"][:count]
    assert list(frames) == [b"a", b"b", b"c"][count:]
