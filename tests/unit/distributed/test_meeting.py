import os
import socket
import struct
import time

import pytest

from tpserve.api import Closed, DeadlineExceeded, FrameError, PeerLost, SyncContext, TransportError
from tpserve.distributed import quota
from tpserve.distributed.meeting import Meeting, greeting_of
from tpserve.testing.lab import Task, soon

AT_ONCE = 5
"""Seconds in which a death is noticed, and a wait ended."""


@pytest.fixture
def meeting(tmp_path):
    """Makes a rank's end; all are closed in the end."""
    ends = []

    def make(rank: int, size: int = 3) -> Meeting:
        ends.append(Meeting(SyncContext(rank, size, tmp_path, "sync", None)))
        return ends[-1]

    yield make
    for end in ends:
        end.close()
        end.close()
    assert list(tmp_path.iterdir()) == []


def met(meeting, size: int = 3) -> list[Meeting]:
    ends = [meeting(rank, size) for rank in range(size)]
    leading = Task(ends[0].lead, [], soon())
    for task in [Task(end.follow, 0, soon()) for end in ends[1:]]:
        assert task.result() == []
    leading.result()
    return ends


def test_descriptors_are_handed_round(meeting):
    leader, follower = meeting(0, 2), meeting(1, 2)
    read, write = os.pipe()
    leading = Task(leader.lead, [write], soon())
    (mine,) = follower.follow(1, soon())
    leading.result()
    os.write(mine, b"hello")
    assert os.read(read, 5) == b"hello"
    for descriptor in (read, write, mine):
        os.close(descriptor)


def test_a_directory_with_a_long_path_will_do(meeting, tmp_path):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    ends = [Meeting(SyncContext(rank, 2, deep, "sync", None)) for rank in range(2)]
    leading = Task(ends[0].lead, [], soon())
    ends[1].follow(0, soon())
    leading.result()
    for end in ends:
        end.close()
    deep.rmdir()


def test_who_has_gone_is_known(meeting):
    leader, first, second = met(meeting)
    assert [end.lost() for end in (leader, first, second)] == [None, None, None]
    second.close()
    assert leader.lost() == 2
    assert first.lost() is None
    leader.close()
    assert first.lost() == 0


def test_a_rank_that_waits_at_a_barrier_has_not_gone(meeting):
    leader, first, _ = met(meeting)
    waiting = Task(first.barrier, soon())
    with pytest.raises(DeadlineExceeded, match="rank 2"):
        leader.barrier(time.monotonic() + 0.3)
    assert leader.lost() is None
    leader.close()
    with pytest.raises(PeerLost):
        waiting.result()


def test_a_barrier_tells_who_has_gone(meeting):
    leader, first, second = met(meeting)
    waiting = Task(first.barrier, soon())
    second.close()
    with pytest.raises(PeerLost, match="rank 2"):
        leader.barrier(soon())
    leader.close()
    with pytest.raises(PeerLost):
        waiting.result()


def test_a_barrier_does_not_wait_for_one_to_see_that_another_has_gone(meeting):
    leader, first, second = met(meeting)
    second.close()
    with pytest.raises(PeerLost, match="rank 2"):
        leader.barrier(soon())
    assert leader.lost() == 2
    first.close()
    leader.close()


def test_one_that_came_to_a_barrier_and_has_gone_is_missed_while_another_is_awaited(meeting):
    leader, first, _second = met(meeting)
    coming = Task(first.barrier, soon())
    waiting = Task(leader.barrier, soon())
    time.sleep(0.3)
    first.close()
    with pytest.raises(PeerLost, match="rank 1"):
        waiting.result(AT_ONCE)
    with pytest.raises(Closed):
        coming.result(AT_ONCE)


def test_one_that_joined_and_has_gone_is_missed_while_another_is_awaited(meeting):
    leading = Task(meeting(0).lead, [], soon())
    first = meeting(1)
    coming = Task(first.follow, 0, soon())
    time.sleep(0.3)
    first.close()
    with pytest.raises(PeerLost, match="rank 1"):
        leading.result(AT_ONCE)
    with pytest.raises(Closed):
        coming.result(AT_ONCE)


def test_closing_ends_what_waits(meeting, tmp_path):
    leader, early, late = meeting(0), meeting(1), meeting(2)
    following = Task(late.follow, 0, soon())  # nobody leads
    time.sleep(0.1)
    late.close()
    with pytest.raises(Closed):
        following.result(AT_ONCE)
    leading = Task(leader.lead, [], soon())
    while not (tmp_path / "sync").exists():
        time.sleep(0.001)
    following = Task(early.follow, 0, soon())
    time.sleep(0.1)
    leader.close()
    with pytest.raises(Closed):
        leading.result(AT_ONCE)
    with pytest.raises(PeerLost):
        following.result(AT_ONCE)


@pytest.mark.parametrize("rank", range(3))
def test_closing_ends_a_wait_at_a_barrier(meeting, rank):
    end = met(meeting)[rank]
    waiting = Task(end.barrier, soon())
    time.sleep(0.1)
    end.close()
    with pytest.raises(Closed):
        waiting.result(AT_ONCE)
    with pytest.raises(Closed):
        end.barrier(soon())


def test_a_leader_that_gives_up_is_an_error_at_those_who_came(meeting):
    leader, first = meeting(0), meeting(1)
    coming = Task(first.follow, 0, soon())
    with pytest.raises(DeadlineExceeded, match="1 of 2"):
        leader.lead([], time.monotonic() + 0.5)
    leader.close()
    with pytest.raises(PeerLost, match="given up"):
        coming.result()


def test_nobody_leads_twice(meeting, tmp_path):
    leading = Task(meeting(0, 2).lead, [], soon())
    while not (tmp_path / "sync").exists():
        time.sleep(0.001)
    with pytest.raises(TransportError, match="cannot meet"):
        meeting(0, 2).lead([], soon())
    meeting(1, 2).follow(0, soon())
    leading.result()


def come(tmp_path, leading, greeting: bytes) -> socket.socket:
    guest = socket.socket(socket.AF_UNIX)
    while guest.connect_ex(str(tmp_path / "sync")):
        assert not leading.is_done
    guest.sendall(greeting)
    return guest


@pytest.mark.parametrize("greeting", [greeting_of(0), greeting_of(3), struct.pack("<I", 1), b"what"])
def test_a_stranger_is_turned_away(meeting, tmp_path, greeting):
    leading = Task(meeting(0).lead, [], soon())
    with come(tmp_path, leading, greeting) as guest:
        guest.shutdown(socket.SHUT_WR)
        guest.settimeout(30)
        assert guest.recv(1) == b""
    for task in [Task(meeting(rank).follow, 0, soon()) for rank in (1, 2)]:
        task.result()
    leading.result()


def test_a_leader_that_waited_in_vain_tells_of_strangers(meeting, tmp_path):
    leading = Task(meeting(0).lead, [], time.monotonic() + 0.5)
    with come(tmp_path, leading, b"what") as guest:
        guest.shutdown(socket.SHUT_WR)
        with pytest.raises(DeadlineExceeded, match=r"0 of 2 .*/sync, .* said b'what'"):
            leading.result()


def test_a_second_of_the_same_rank_is_an_error(meeting, tmp_path):
    leading = Task(meeting(0).lead, [], soon())
    with (
        come(tmp_path, leading, greeting_of(1)),
        come(tmp_path, leading, greeting_of(1)),
        pytest.raises(FrameError, match=r"a second rank 1 came to .*/sync"),
    ):
        leading.result()


def test_cores_are_counted_together(meeting, monkeypatch):
    ends = met(meeting, 2)
    for own, peers, cores in (({0}, {0}, 1), ({0}, {1}, 2), ({0, 1}, {1}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, own=own, peers=peers: set(peers if pid else own))
        assert [end.cores() for end in ends] == [cores] * 2


def test_a_container_has_no_more_cores_than_its_share(meeting, monkeypatch, tmp_path_factory):
    ends = met(meeting, 2)
    cgroup = tmp_path_factory.mktemp("cgroup")
    monkeypatch.setattr(quota, "CGROUP", cgroup)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for share, cores in (("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)):
        (cgroup / "cpu.max").write_text(share)
        assert [end.cores() for end in ends] == [cores] * 2
