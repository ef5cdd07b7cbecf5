"""Groups of ranks with a sync and its fan-out, for the contract of the ``sync`` kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tpserve.api import (
    Announcement,
    FanoutReceiver,
    FanoutSender,
    NoOptions,
    Options,
    Sync,
    SyncContext,
    SyncSpec,
    TransportSpec,
)
from tpserve.plugins.builtin import tpserve_transports
from tpserve.testing.lab import Lab, Task, soon
from tpserve.testing.processes import Child, fanout_end, load
from tpserve.testing.streams import difference

__all__ = ["Group", "announce_until_error", "hear_until_error", "hear_until_heartbeat", "numbered", "take_rounds"]


class Group:
    """Makes the ranks of a group, in this process and outside.

    Args:
        spec: of the sync.
        options: for it.
        transport: of the fan-out; None: one that works inside this process.
    """

    def __init__(self, spec: SyncSpec, options: Options, transport: TransportSpec | None) -> None:
        self._spec = spec
        self._options = options
        self._transport = transport
        inproc = tpserve_transports()[0]
        self._lab = Lab(transport or inproc, transport.options() if transport else NoOptions())
        self._ends: dict[int, tuple[FanoutSender | FanoutReceiver, Sync]] = {}
        self._number = 0
        self.renew()

    def renew(self) -> None:
        """Close all ranks and begin a new group."""
        for rank in list(self._ends):
            self.leave(rank)
        self._lab.close_transports()
        self._number += 1
        self._run_dir = self._lab.directory / f"group{self._number}"
        self._run_dir.mkdir()

    def connected(self, size: int, wrap: Callable[[FanoutSender], FanoutSender] | None = None) -> list[Any]:
        """All ranks of a group in this process, rank 0 first; ``wrap`` puts something before the leader's fan-out."""
        joining = [Task(self.join, rank, size, soon(), wrap) for rank in range(size)]
        return [task.result() for task in joining]

    def join(
        self, rank: int, size: int, deadline: float, wrap: Callable[[FanoutSender], FanoutSender] | None = None
    ) -> Sync:
        """Make one rank in this process, and connect its fan-out and its sync."""
        fanout = self._fanout(rank, size)
        if wrap is not None and isinstance(fanout, FanoutSender):
            fanout = wrap(fanout)
        fanout.connect(deadline)
        return self._sync(rank, size, fanout, deadline)

    def apart(self, size: int) -> list[Callable[[float], Sync]]:
        """Ranks in this process whose fan-outs are connected; each makes its sync and connects it by a deadline."""
        fanouts = [self._fanout(rank, size) for rank in range(size)]
        for task in [Task(fanout.connect, soon()) for fanout in fanouts]:
            task.result()
        return [partial(self._sync, rank, size, fanout) for rank, fanout in enumerate(fanouts)]

    def child(self, role: str, size: int, **arguments: Any) -> Child:
        """A process that is a rank; follow with :meth:`with_process`."""
        names = None
        if self._transport is not None:
            options = self._transport.options
            names = [self._transport.factory, f"{options.__module__}:{options.__qualname__}"]
        place = {"size": size, "run_dir": str(self._run_dir), "fanout": names}
        return Child(self._spec, self._options, role, **place, **arguments)

    def with_process(self, child: Child, rank: int, size: int) -> Sync:
        """The other rank of two, in this process."""
        sync = self.beside_process(rank, size)(soon())
        child.ready()
        return sync

    def beside_process(self, rank: int, size: int) -> Callable[[float], Sync]:
        """The same, not connected: what makes the sync and connects it by a deadline."""
        fanout = self._fanout(rank, size)
        if self._transport is not None:
            fanout.connect(soon())
        return partial(self._sync, rank, size, fanout)

    @property
    def run_dir(self) -> Path:
        """Of the present group."""
        return self._run_dir

    def leave(self, rank: int) -> None:
        """Close one rank's ends, as a process does that stops."""
        fanout, sync = self._ends.pop(rank)
        sync.close()
        fanout.close()

    def files(self) -> list[Path]:
        """What all groups so far have left."""
        return [path for path in self._lab.directory.rglob("*") if not path.is_dir()]

    def close(self) -> None:
        """Close all ranks and remove the directory."""
        for rank in list(self._ends):
            self.leave(rank)
        self._lab.close()

    def _fanout(self, rank: int, size: int) -> FanoutSender | FanoutReceiver:
        return fanout_end(self._lab.transport(), f"ipc://{self._run_dir}/fanout", rank, size)

    def _sync(self, rank: int, size: int, fanout: FanoutSender | FanoutReceiver, deadline: float) -> Sync:
        context = SyncContext(rank=rank, size=size, run_dir=self._run_dir, name="sync", fanout=fanout)
        sync: Sync = load(self._spec.factory)(self._options, context)
        self._ends[rank] = (fanout, sync)
        sync.connect(deadline)
        return sync


def numbered(number: int) -> Announcement:
    """An announcement that says which it is."""
    return Announcement(number, number, 1, number - 1, -number)


def take_rounds(follower: Sync, rounds: list[tuple[Announcement, list[bytes]]]) -> None:
    """See these rounds arrive."""
    fanout = follower.context.fanout
    assert isinstance(fanout, FanoutReceiver)
    for announcement, frames in rounds:
        assert follower.receive(soon()) == announcement
        assert difference(fanout.recv_many(len(frames), soon()), frames) is None, f"round {announcement.round}"


def hear_until_error(follower: Sync, heard: list[Announcement]) -> None:
    """Note what is announced."""
    while True:
        heard.append(follower.receive(time.monotonic() + 1))


def hear_until_heartbeat(follower: Sync) -> list[Announcement]:
    """The rounds that are announced before a sign of life comes."""
    heard: list[Announcement] = []
    while not (announcement := follower.receive(soon())).is_heartbeat:
        heard.append(announcement)
    return heard


def announce_until_error(leader: Sync, patience: float | None = None) -> None:
    """Announce for as long as it goes, a thousand times a second."""
    end = soon()
    number = 0
    while time.monotonic() < end:
        leader.announce(numbered(number), soon() if patience is None else time.monotonic() + patience)
        number += 1
        time.sleep(0.001)
