"""What the contracts say of those who meet: nobody is held up by strangers, or by one of them who was stopped.

Strangers come to sockets in a directory, say nothing, and are more than it holds. One who was stopped may have been so
in the middle of anything, and has a lock on every file.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tpserve.api import DeadlineExceeded
from tpserve.testing.lab import SLACK, Lab, Task, see_soon_after, soon
from tpserve.testing.links import LinkContract, ends_of
from tpserve.testing.processes import Child, numbered
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

    @pytest.mark.parametrize("stopped", ["leader", "follower"])
    def test_an_end_that_is_stopped_on_joining_holds_nobody_up(
        self, lab: Lab, processes: None, fanout: None, stopped: str
    ) -> None:
        """Before the others of three have come, who all keep their deadlines."""
        address = lab.address()
        if stopped == "leader":
            child = lab.child("lead", address=address, followers=2, count=0)
        else:
            child = lab.child("follow", address=address, follower=0, followers=2)
        with standing_still(child, lab.directory):
            others: list[Any] = [lab.transport().fanout_receiver(address, 1, 2)]
            if stopped == "leader":
                others.append(lab.transport().fanout_receiver(address, 0, 2))
            else:
                others.append(lab.transport().fanout_sender(address, 2))
            deadline = time.monotonic() + 0.5
            for task in [Task(end.connect, deadline) for end in others]:
                sees_the_deadline(task, deadline)

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

    @pytest.mark.parametrize("stopped", [0, 1])
    def test_a_rank_that_is_stopped_on_joining_holds_nobody_up(self, group: Group, stopped: int) -> None:
        """Before the other has come; and more strangers have than can wait at its socket, if it has one."""
        role: dict[str, Any] = {"role": "sync_follow", "rank": 1} if stopped else {"role": "sync_lead", "count": 0}
        with group.child(size=2, **role) as child:
            join = group.beside_process(rank=1 - stopped, size=2)
            with standing_still(child, group.run_dir), strangers(group.run_dir, CROWD):
                deadline = time.monotonic() + 0.5
                sees_the_deadline(Task(join, deadline), deadline)


@contextmanager
def standing_still(child: Child, directory: Path) -> Iterator[None]:
    """Stop a process that waits for others, with a lock on every file in the directory where they meet."""
    child.meeting()
    time.sleep(SEEING)
    child.send(signal.SIGSTOP)
    with ExitStack() as locks:
        for path in directory.rglob("*"):
            with suppress(OSError):  # a socket, or it has a lock on that itself
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                locks.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def strangers(directory: Path, count: int) -> Iterator[None]:
    """Have so many connect to each socket in a directory, or as can. They say nothing and stay."""
    guests: list[socket.socket] = []
    end = time.monotonic() + SEEING
    try:
        while not guests and time.monotonic() < end:
            for path in directory.iterdir():
                if path.is_socket():
                    guests += _crowd(path, count)
            time.sleep(0.01)
        yield
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
