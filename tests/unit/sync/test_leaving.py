"""What waits ends: with Closed when another thread closes, and with PeerLost when a rank has gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tpserve.api import Announcement, Closed, FanoutSender, PeerLost, Sync, SyncContext
from tpserve.plugins.builtin import tpserve_syncs
from tpserve.testing.lab import Task, soon
from tpserve.testing.processes import load

AT_ONCE = 5
"""Seconds in which a wait ends."""

Make = Callable[[str, int, int], Sync]


class NoFanout(FanoutSender):
    """Of a rank that sends nothing over it."""

    def connect(self, deadline: float) -> None:
        raise AssertionError

    send_many = connect

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes ranks that meet, by the sync's name, the rank and how many there are."""
    made: list[Sync] = []

    def one(name: str, rank: int, size: int) -> Sync:
        spec = next(spec for spec in tpserve_syncs() if spec.name == name)
        made.append(load(spec.factory)(spec.options(), SyncContext(rank, size, tmp_path, "sync", NoFanout())))
        return made[-1]

    yield one
    for sync in made:
        sync.close()
        sync.close()
    assert list(tmp_path.iterdir()) == []


def joined(make: Make, name: str, size: int) -> list[Sync]:
    syncs = [make(name, rank, size) for rank in range(size)]
    for task in [Task(sync.connect, soon()) for sync in syncs]:
        task.result()
    return syncs


def ends(waiting: Task[object], by: Callable[[], None], error: type[Exception], match: str | None = None) -> None:
    time.sleep(0.3)
    assert not waiting.is_done
    by()
    with pytest.raises(error, match=match):
        waiting.result(AT_ONCE)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["shm", "inband", "gloo"])
def test_closing_ends_joining(make: Make, name: str, rank: int) -> None:
    sync = make(name, rank, 2)
    ends(Task(sync.connect, soon()), sync.close, Closed)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["shm", "inband", "gloo"])
def test_closing_ends_a_wait_at_a_barrier(make: Make, name: str, rank: int) -> None:
    sync = joined(make, name, 2)[rank]
    ends(Task(sync.barrier, soon()), sync.close, Closed)


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_closing_ends_a_wait_for_an_announcement(make: Make, name: str) -> None:
    leader, follower = joined(make, name, 2)
    leader.announce(Announcement(0, 0, 0, -1, 0), soon())
    follower.receive(soon())
    ends(Task(follower.receive, soon()), follower.close, Closed)
    with pytest.raises(Closed):
        follower.receive(soon())


@pytest.mark.parametrize("name", ["shm", "inband"])
def test_a_rank_that_joined_and_has_gone_is_missed_while_another_is_awaited(make: Make, name: str) -> None:
    leader, first = (make(name, rank, 3) for rank in range(2))
    leading, joining = (Task(sync.connect, soon()) for sync in (leader, first))
    ends(leading, first.close, PeerLost, "rank 1 has gone")
    with pytest.raises(Closed):
        joining.result()


@pytest.mark.parametrize("name", ["shm", "inband"])
def test_a_rank_that_came_to_a_barrier_and_has_gone_is_missed_while_another_is_awaited(make: Make, name: str) -> None:
    leader, first, _second = joined(make, name, 3)
    leading, coming = (Task(sync.barrier, soon()) for sync in (leader, first))
    ends(leading, first.close, PeerLost, "rank 1 has gone")
    with pytest.raises(Closed):
        coming.result()
