import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpserve.envelope import LARGE, SIZE, Opener, Sealer
from tpserve.errors import FrameError


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=50))))
def test_each_producer_has_its_own_sequence(messages):
    sealers, opener = [Sealer(65_535 - number) for number in range(4)], Opener()
    for producer, payload in messages:
        assert opener.open(sealers[producer].seal(payload)) == payload


@pytest.mark.parametrize("size", [0, 1, LARGE - 1, LARGE, 3 * LARGE])
def test_messages_of_all_sizes_come_back(size):
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    frame = Sealer(1).seal(payload)
    assert len(frame) == SIZE + size
    assert Opener().open(frame) == payload


@given(st.integers(0, 8 * (SIZE + 20) - 1))
def test_no_bit_can_be_changed(bit):
    frame = bytearray(Sealer(1).seal(bytes(range(20))))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        Opener().open(bytes(frame))


@pytest.mark.parametrize("change", [lambda f: f[:-1], lambda f: f + b"x", lambda f: f[:SIZE], lambda f: f[:5]])
def test_no_frame_can_be_cut_or_stretched(change):
    with pytest.raises(FrameError):
        Opener().open(change(Sealer(1).seal(b"message")))


def test_a_frame_left_out_or_sent_twice_is_noticed():
    sealer, opener = Sealer(7), Opener()
    first, second, third = (sealer.seal(b"x") for _ in range(3))
    opener.open(first)
    with pytest.raises(FrameError, match="producer 7: expected frame 1, found frame 2"):
        opener.open(third)
    opener.open(second)
    with pytest.raises(FrameError, match="expected frame 2, found frame 1"):
        opener.open(second)


def test_another_version_is_named():
    frame = Sealer(1).seal(b"x")
    with pytest.raises(FrameError, match="version 2, found b'TPSV' version 1"):
        Opener().open(frame[:4] + b"\x01\0" + frame[6:])
