"""What the contracts say of sockets in a directory: strangers come who are silent, and more than it holds.

A link or a sync that meets at no socket has nothing to try: there is nowhere to come to.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tpserve.api import DeadlineExceeded
from tpserve.testing.lab import SLACK, Lab, Task, see_soon_after, soon
from tpserve.testing.links import LinkContract, ends_of
from tpserve.testing.processes import PATIENCE, numbered
from tpserve.testing.sync_group import Group

__all__ = ["FanoutDoorContract", "SyncDoorContract"]

CROWD = 200
"""More than wait at a socket, unless somebody lets them in."""

SEEING = 0.3
"""Seconds in which who wants to meet others has made a socket, if it makes one."""


class FanoutDoorContract(LinkContract):
    """What fan-outs promise of strangers."""

    def test_a_silent_stranger_holds_no_follower_up(self, lab: Lab, fanout: None) -> None:
        """It has come first, and stays."""
        leader, follower = ends_of(lab, 1)
        leading = Task(leader.connect, soon())
        with strangers(lab.directory, 1):
            joining = Task(follower.connect, soon())
            leading.result()
            joining.result()
            leader.send_many([numbered(0)], soon())
            assert follower.recv_many(1, soon()) == [numbered(0)]

    def test_a_leader_with_a_silent_stranger_keeps_its_deadline(self, lab: Lab, fanout: None) -> None:
        """Nobody else comes."""
        leader, _follower = ends_of(lab, 1)
        deadline = time.monotonic() + 2 * SEEING
        leading = Task(leader.connect, deadline)
        with strangers(lab.directory, 1):
            sees_the_deadline(leading, deadline)

    def test_a_follower_that_is_not_let_in_keeps_its_deadline(self, lab: Lab, fanout: None) -> None:
        """The leader is there, but busy elsewhere, and more have come already than can wait at its socket."""
        _leader, follower = ends_of(lab, 1)
        with strangers(lab.directory, CROWD):
            deadline = time.monotonic() + 0.3
            sees_the_deadline(Task(follower.connect, deadline), deadline)


class SyncDoorContract:
    """What syncs promise of strangers."""

    def test_a_silent_stranger_holds_no_rank_up(self, group: Group) -> None:
        """It has come first, and stays."""
        lead, follow = group.apart(2)
        leading = Task(lead, soon())
        with strangers(group.run_dir, 1):
            following = Task(follow, soon())
            leading.result()
            following.result()

    def test_a_leader_with_a_silent_stranger_keeps_its_deadline(self, group: Group) -> None:
        """And leaves no file behind, though nobody else comes."""
        lead, _follow = group.apart(2)
        deadline = time.monotonic() + 2 * SEEING
        leading = Task(lead, deadline)
        with strangers(group.run_dir, 1):
            sees_the_deadline(leading, deadline)
        group.renew()
        assert group.files() == []

    def test_a_follower_that_is_not_let_in_keeps_its_deadline(self, group: Group) -> None:
        """The leader stands still, and more have come already than can wait at its socket."""
        with group.child("sync_lead", size=2, count=0) as child:
            follow = group.beside_process(rank=1, size=2)
            _await_leader(group.run_dir)
            with strangers(group.run_dir, 1) as came:
                if not came:
                    pytest.skip("the ranks meet at no socket")
                child.send(signal.SIGSTOP)
                with strangers(group.run_dir, CROWD):
                    deadline = time.monotonic() + 0.3
                    sees_the_deadline(Task(follow, deadline), deadline)


@contextmanager
def strangers(directory: Path, count: int) -> Iterator[int]:
    """Have so many connect to each socket in a directory, or as can; how many came. They say nothing and stay."""
    guests: list[socket.socket] = []
    end = time.monotonic() + SEEING
    try:
        while not guests and time.monotonic() < end:
            for path in directory.iterdir():
                if path.is_socket():
                    guests += _crowd(path, count)
            time.sleep(0.01)
        yield len(guests)
    finally:
        for guest in guests:
            guest.close()


def sees_the_deadline(task: Task[Any], deadline: float) -> None:
    """See a call end at its deadline, and not much later."""
    with pytest.raises(DeadlineExceeded):
        task.result(deadline - time.monotonic() + SLACK)
    see_soon_after(deadline)


def _crowd(path: Path, count: int) -> list[socket.socket]:
    """Come to a socket of whatever type, until nobody else can."""
    came: list[socket.socket] = []
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        for _ in range(count):
            guest = socket.socket(socket.AF_UNIX, kind)
            guest.setblocking(False)
            if guest.connect_ex(str(path)):
                guest.close()
                break
            came.append(guest)
    return came


def _await_leader(run_dir: Path) -> None:
    """Wait until a leader's process has something in the group's directory, if it needs that."""
    end = time.monotonic() + min(PATIENCE, 5.0)
    while not any(run_dir.glob("sync*")) and time.monotonic() < end:
        time.sleep(0.01)
