"""The ring alone: frames round its end, and what is damaged is an error."""

import mmap
import os
import random
import struct
from collections.abc import Iterator

import pytest

from tpserve.api import FrameError
from tpserve_transport_shm.ring import RingReader, RingWriter, create

SIZE = 4096
RECORDS = 64 * 3
"""Where the first record of a ring with one reader is."""


class Memory:
    """A ring with one reader, both ends, and a third view to do damage with."""

    def __init__(self) -> None:
        descriptor = create(SIZE, 1)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.writer = RingWriter(descriptor, 1)
        self.reader = RingReader(descriptor, 1, 0, self.bell)
        self.raw = mmap.mmap(descriptor, 0)
        os.close(descriptor)

    def write(self, frame: bytes) -> Iterator[bytes]:
        """Write a frame piece by piece, and read whenever there is no room."""
        end = -1
        while end != len(frame):
            while not self.writer.has_room():
                self.writer.publish()
                yield from self.read()
            end = self.writer.write(frame, max(end, 0), len(frame) % 2 == 1)

    def read(self) -> Iterator[bytes]:
        """What can be read now."""
        while (taken := self.reader.next()) is not None:
            frame, flag = taken
            assert flag == (len(frame) % 2 == 1)
            yield frame

    def send(self, frame: bytes) -> None:
        """Write and publish a small frame."""
        self.writer.write(frame, 0, flag=True)
        self.writer.publish()

    def fill(self) -> None:
        """Send until there is no room."""
        while self.writer.has_room():
            self.send(b"-" * 101)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        self.raw.close()
        os.close(self.bell)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


def test_frames_of_all_sizes_go_round_the_end(memory: Memory) -> None:
    draw = random.Random(0)
    sizes = [0, 1, 15, 16, 17, SIZE, 3 * SIZE, *draw.choices([0, 16, 300, 700, 5000], k=300)]
    frames = [draw.randbytes(size) for size in sizes]

    taken = [frame for written in frames for frame in memory.write(written)]
    memory.writer.publish()
    taken += memory.read()

    assert taken == frames


def test_nothing_is_seen_before_it_is_published(memory: Memory) -> None:
    memory.writer.write(b"frame", 0, flag=True)
    assert memory.reader.next() is None
    memory.writer.publish()
    assert memory.reader.next() == (b"frame", True)
    assert memory.reader.next() is None


@pytest.mark.parametrize("offset", [0, 7, 8, 15, 16, 20])
def test_a_damaged_record_is_an_error(memory: Memory, offset: int) -> None:
    memory.send(b"frame")
    memory.raw[RECORDS + offset] ^= 0x81

    with pytest.raises(FrameError, match="byte 0 is damaged"):
        memory.reader.next()


def test_damage_in_a_later_piece_is_an_error(memory: Memory) -> None:
    frame = b"-" * (SIZE // 2)
    end = memory.writer.write(frame, 0, flag=True)
    assert memory.writer.write(frame, end, flag=True) < SIZE
    memory.writer.publish()
    memory.raw[RECORDS + 16 + end + 20] ^= 1

    with pytest.raises(FrameError, match="damaged"):
        memory.reader.next()


def test_a_record_of_an_earlier_time_does_not_pass(memory: Memory) -> None:
    for _ in range(SIZE // 32):
        memory.send(b"frame")
        assert memory.reader.next() == (b"frame", True)
        assert memory.writer.has_room()
    memory.raw[0:8] = struct.pack("<Q", SIZE + 32)

    with pytest.raises(FrameError, match=f"byte {SIZE} is damaged"):
        memory.reader.next()


def test_a_reader_where_nothing_was_written_is_an_error(memory: Memory) -> None:
    memory.raw[128:136] = struct.pack("<Q", 1 << 40)

    with pytest.raises(FrameError, match="a reader is at byte"):
        memory.fill()


def test_a_reader_tells_once_that_there_is_room(memory: Memory) -> None:
    memory.fill()
    memory.writer.want_room()
    told = 0
    for _ in memory.read():
        try:
            told += os.eventfd_read(memory.bell)
        except BlockingIOError:
            continue
        assert memory.writer.has_room()
    assert told == 1
