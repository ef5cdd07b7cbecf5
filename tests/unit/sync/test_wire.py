import pytest

from tpserve.api import Announcement, FrameError
from tpserve.api.sync import HEARTBEAT
from tpserve.sync.wire import SIZE, decode, encode

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
SAID = Announcement(7, 21, 3, 6, -5)


@pytest.mark.parametrize(
    "announcement", [SAID, Announcement(0, 0, HEARTBEAT, -1, 0), Announcement(HIGHEST, HIGHEST, 0, LOWEST, LOWEST)]
)
def test_an_announcement_comes_back(announcement):
    frame = encode(announcement, 12)
    assert len(frame) == SIZE == 64
    assert decode(frame, 12) == announcement


def test_every_damaged_byte_is_noticed():
    frame = encode(SAID, 12)
    for index in range(SIZE):
        damaged = bytearray(frame)
        damaged[index] ^= 1
        with pytest.raises(FrameError):
            decode(bytes(damaged), 12)


@pytest.mark.parametrize("frame", [b"", encode(SAID, 12)[:-1], encode(SAID, 12) + b"-", bytes(SIZE)])
def test_what_is_no_announcement_is_noticed(frame):
    with pytest.raises(FrameError):
        decode(frame, 12)


def test_another_announcement_is_noticed():
    with pytest.raises(FrameError, match="expected announcement 13, found announcement 12"):
        decode(encode(SAID, 12), 13)
