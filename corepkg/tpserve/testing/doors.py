"""What the contracts say of those who meet: nobody is held up by strangers, or by one of them who was stopped.

Strangers come before others, meanwhile and later; say nothing, nonsense or a small number; and may be more than a
socket holds. One who was stopped may have been so in the middle of anything, and has a lock on every file.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tpserve.api import DeadlineExceeded, SyncError, TransportError
from tpserve.testing.lab import SLACK, Lab, Task, see_soon_after, soon
from tpserve.testing.links import ALL_SCHEMES, LinkContract, ends_of
from tpserve.testing.processes import Child, numbered
from tpserve.testing.strangers import SEEING, Strangers, overheard, silent_strangers
from tpserve.testing.streams import difference
from tpserve.testing.sync_group import Group
from tpserve.testing.sync_group import numbered as announcement

__all__ = ["LinkDoorContract", "SyncDoorContract"]

CROWD = 200
"""More than wait at a socket, unless somebody lets them in."""

MANY = 100


class LinkDoorContract(LinkContract):
    """What fan-outs and pipes promise of strangers.

    One who connects to where a link listens, and says nothing or nonsense, takes nobody's place, delays nobody beyond a
    deadline and makes nobody fail; all frames arrive.
    """

    @ALL_SCHEMES
    def test_strangers_hold_no_follower_up(self, lab: Lab, fanout: None) -> None:
        """They come first, while followers join and when all have come; stay, or leave at once."""
        with undisturbed(), Strangers(_greetings_of_followers(lab)) as strangers:
            address = lab.address()
            leader = lab.transport().fanout_sender(address, 2)
            joining = [Task(leader.connect, soon())]
            strangers.come_first()
            followers = []
            for number in range(2):
                followers.append(lab.transport().fanout_receiver(address, number, 2))
                joining.append(Task(followers[-1].connect, soon()))
                strangers.come()
            for task in joining:
                task.result()
            strangers.come()
            frames = [numbered(number) for number in range(MANY)]
            reading = [Task(end.recv_many, MANY, soon()) for end in followers]
            for batch in (frames[:1], frames[1:]):
                leader.send_many(batch, soon())
            for read in reading:
                assert difference(read.result(), frames) is None

    @ALL_SCHEMES
    def test_strangers_hold_no_sender_up(self, lab: Lab, pipes: None) -> None:
        """Nor a receiver; they come at any time."""
        with undisturbed(), Strangers(_greetings_of_senders(lab)) as strangers:
            address = lab.address()
            receiver = lab.transport().pipe_receiver(address)
            strangers.come_first()
            sender = lab.transport().pipe_sender(address)
            joining = Task(sender.connect, soon())
            strangers.come()
            joining.result()
            for number in range(2):
                sender.send(numbered(number), soon())
                assert receiver.recv_many(1, 1, soon()) == [numbered(number)]
                strangers.come()

    def test_a_leader_with_a_silent_stranger_keeps_its_deadline(self, lab: Lab, fanout: None) -> None:
        """Nobody else comes."""
        leader, _follower = ends_of(lab, 1)
        deadline = time.monotonic() + 2 * SEEING
        leading = Task(leader.connect, deadline)
        with silent_strangers(lab.directory, 1):
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
        with silent_strangers(lab.directory, CROWD):
            deadline = time.monotonic() + 0.3
            sees_the_deadline(Task(follower.connect, deadline), deadline)


class SyncDoorContract:
    """What syncs promise of strangers: the same as links."""

    def test_strangers_hold_no_rank_up(self, group: Group) -> None:
        """They come first, while ranks join and when all have come; stay, or leave at once."""
        with undisturbed(), Strangers(_greetings_of_ranks(group)) as strangers:
            lead, *follow = group.apart(3)
            joining = [Task(lead, soon())]
            strangers.come_first()
            for join in follow:
                joining.append(Task(join, soon()))
                strangers.come()
            leader, *followers = [task.result() for task in joining]
            strangers.come()
            hearing = [Task(end.receive, soon()) for end in followers]
            leader.announce(announcement(0), soon())
            assert [heard.result() for heard in hearing] == [announcement(0)] * 2

    def test_a_leader_with_a_silent_stranger_keeps_its_deadline(self, group: Group) -> None:
        """And leaves no file behind, though nobody else comes."""
        lead, _follow = group.apart(2)
        deadline = time.monotonic() + 2 * SEEING
        leading = Task(lead, deadline)
        with silent_strangers(group.run_dir, 1):
            sees_the_deadline(leading, deadline)
        group.renew()
        assert group.files() == []

    @pytest.mark.parametrize("stopped", [0, 1])
    def test_a_rank_that_is_stopped_on_joining_holds_nobody_up(self, group: Group, stopped: int) -> None:
        """Before the other has come; and more strangers have than can wait at its socket, if it has one."""
        role: dict[str, Any] = {"role": "sync_follow", "rank": 1} if stopped else {"role": "sync_lead", "count": 0}
        with group.child(size=2, **role) as child:
            join = group.beside_process(rank=1 - stopped, size=2)
            with standing_still(child, group.run_dir), silent_strangers(group.run_dir, CROWD):
                deadline = time.monotonic() + 0.5
                sees_the_deadline(Task(join, deadline), deadline)


@contextmanager
def undisturbed() -> Iterator[None]:
    """See that strangers, who come to where somebody listens, make no call inside fail."""
    try:
        yield
    except (TransportError, SyncError) as error:
        raise AssertionError(
            f"with strangers about, a call of those who are expected fails ({type(error).__name__}: {error}). Who"
            " listens must take nobody for a peer who does not say what peers say, and drop others without harm to any"
        ) from error


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


def sees_the_deadline(task: Task[Any], deadline: float) -> None:
    """See a call end at its deadline, and not much later."""
    with pytest.raises(DeadlineExceeded):
        task.result(deadline - time.monotonic() + SLACK)
    see_soon_after(deadline)


def _greetings_of_followers(lab: Lab) -> list[bytes]:
    address = lab.address()

    def lead(deadline: float) -> None:
        with lab.transport().fanout_sender(address, 1) as end:
            end.connect(deadline)

    def follow(deadline: float) -> None:
        with lab.transport().fanout_receiver(address, 0, 1) as end:
            end.connect(deadline)

    return overheard(lead, follow)


def _greetings_of_senders(lab: Lab) -> list[bytes]:
    address = lab.address()

    def read(deadline: float) -> None:
        with lab.transport().pipe_receiver(address) as end:
            end.recv_many(1, 1, deadline)

    def send(deadline: float) -> None:
        with lab.transport().pipe_sender(address) as end:
            end.connect(deadline)

    return overheard(read, send)


def _greetings_of_ranks(group: Group) -> list[bytes]:
    def joining(rank: int, join: Callable[[float], object], deadline: float) -> None:
        try:
            join(deadline)
        finally:
            group.leave(rank)

    greetings = overheard(*(partial(joining, rank, join) for rank, join in enumerate(group.apart(2))))
    group.renew()
    return greetings
