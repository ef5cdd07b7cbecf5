"""Rounds over each built-in synchronisation, as the sources of a rank use them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tpserve.api import (
    Announcement,
    FanoutReceiver,
    FanoutSender,
    FrameError,
    NoOptions,
    PipeReceiver,
    RankError,
    Sync,
    SyncContext,
)
from tpserve.envelope import Sealer
from tpserve.messages import Abort, encode
from tpserve.plugins.builtin import tpserve_syncs
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.round import Caps, FollowerSource, LeaderSource
from tpserve.sync import shm
from tpserve.sync.shm import ShmSync
from tpserve.testing.lab import Task, soon
from tpserve.testing.processes import load
from tpserve.transports.inproc import InprocTransport

SYNCS = {spec.name: spec for spec in tpserve_syncs()}
WATCHDOG = 30.0


class Batches(PipeReceiver):
    """Gives out prepared rounds."""

    def __init__(self, rounds: list[list[bytes]]) -> None:
        self.rounds = rounds

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        return self.rounds.pop(0)

    def close(self) -> None: ...


class Watched(FanoutSender):
    """A fan-out that notes what is sent together."""

    def __init__(self, sender: FanoutSender) -> None:
        self.sender = sender
        self.sends: list[list[bytes]] = []

    def connect(self, deadline: float) -> None:
        self.sender.connect(deadline)

    def send_many(self, frames, deadline: float) -> None:
        self.sends.append(list(frames))
        self.sender.send_many(frames, deadline)

    def close(self) -> None:
        self.sender.close()


class Two:
    """A leader and a follower over a sync."""

    def __init__(self, name: str, directory: Path) -> None:
        self.transport = InprocTransport(NoOptions())
        self.fanout = Watched(self.transport.fanout_sender("ipc:///fanout", 1))
        self.receiver = self.transport.fanout_receiver("ipc:///fanout", 0, 1)
        ends: list[FanoutSender | FanoutReceiver] = [self.fanout, self.receiver]
        spec = SYNCS[name]
        self.syncs: list[Sync] = [
            load(spec.factory)(spec.options(), SyncContext(rank, 2, directory, "sync", end))
            for rank, end in enumerate(ends)
        ]
        joining = [Task(end.connect, soon()) for end in (*ends, *self.syncs)]
        for task in joining:
            task.result()

    def sources(self, rounds: list[list[bytes]]) -> tuple[LeaderSource, FollowerSource]:
        leader, follower = self.syncs
        log = DecisionLog(0)
        return (
            LeaderSource(Batches(rounds), self.fanout, leader, log, Caps(), 5.0, WATCHDOG),
            FollowerSource(self.receiver, follower, DecisionLog(1), WATCHDOG, 1),
        )

    def close(self) -> None:
        for sync in self.syncs:
            sync.close()
        self.transport.close()


@pytest.fixture
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Two]:
    made = Two(request.param, tmp_path)
    yield made
    made.close()


def rounds_of(*sizes: int) -> list[list[bytes]]:
    sealer = Sealer(1)
    return [[sealer.seal(encode(Abort(uid))) for uid in range(size)] for size in sizes]


@pytest.mark.parametrize("two", SYNCS, indirect=True)
def test_a_follower_sees_the_leaders_rounds(two: Two) -> None:
    sizes = (1, 0, 3, 0, 0, 40, 1)
    leader, follower = two.sources(rounds_of(*sizes))
    following = Task(lambda: [follower.receive(True) for _ in sizes])
    led = [leader.receive(False) for _ in sizes]
    assert following.result() == led
    assert [len(each.messages) for each in led] == list(sizes)


@pytest.mark.parametrize("two", SYNCS, indirect=True)
def test_a_leader_may_be_rounds_ahead(two: Two) -> None:
    sizes = (2, 0, 5)
    leader, follower = two.sources(rounds_of(*sizes))
    led = [leader.receive(False) for _ in sizes]
    assert [follower.receive(True) for _ in sizes] == led


@pytest.mark.parametrize("two", ["inband"], indirect=True)
def test_inband_sends_a_round_in_one_go(two: Two) -> None:
    frames, none = rounds_of(3, 0)
    leader, _ = two.sources([frames, none])
    leader.receive(False)
    leader.receive(False)
    (_, *sent), (_,) = two.fanout.sends
    assert sent == frames


@pytest.mark.parametrize("two", ["inband"], indirect=True)
def test_inband_notices_a_frame_that_nobody_announced(two: Two) -> None:
    _, follower = two.sources([])
    two.fanout.send_many([b"stray"], soon())
    with pytest.raises(RankError, match="expected announcement 0, found a frame of 5 bytes"):
        follower.receive(True)


@pytest.mark.parametrize("two", ["inband"], indirect=True)
def test_inband_notices_a_lost_announcement(two: Two) -> None:
    leader, follower = two.syncs
    leader.announce(Announcement(0, 0, 0, -1, 0), soon())
    two.receiver.recv_many(1, soon())
    leader.announce(Announcement(1, 0, 0, -1, 0), soon())
    with pytest.raises(FrameError, match="expected announcement 0, found announcement 1"):
        follower.receive(soon())


class Reluctant(FanoutSender):
    """A fan-out that takes frames only when the follower has heard of them."""

    def __init__(self) -> None:
        self.hearing: Task[Announcement] | None = None

    def connect(self, deadline: float) -> None: ...

    def send_many(self, frames, deadline: float) -> None:
        assert self.hearing is not None
        self.hearing.result()

    def close(self) -> None: ...


@pytest.mark.parametrize("size", [10, shm.LITTLE + 1])
def test_shm_does_not_wait_for_the_fanout_to_be_heard(tmp_path: Path, size: int) -> None:
    fanout, options = Reluctant(), SYNCS["shm"].options(spin=0)
    syncs = [ShmSync(options, SyncContext(rank, 2, tmp_path, "sync", fanout)) for rank in range(2)]
    for task in [Task(sync.connect, soon()) for sync in syncs]:
        task.result()
    fanout.hearing = Task(syncs[1].receive, soon())
    said = Announcement(0, 0, 1, -1, 0)
    syncs[0].send_round(said, [bytes(size)], soon())
    assert fanout.hearing.result() == said
    for sync in syncs:
        sync.close()
