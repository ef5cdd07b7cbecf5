"""The contract of the ``sync`` kind as tests: subclass :class:`SyncContract` and give it your spec.

class TestMine(SyncContract):
    @pytest.fixture
    def spec(self):
        return plugin.tpserve_syncs()[0]

Every guarantee of :mod:`tpserve.api.sync` is tried, in the situations that the tests name, in threads and in processes
that are stopped and killed. Passing proves no more than that: up to five ranks, 5,000 announcements and ten barriers,
runs of seconds.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import msgspec
import pytest

from tpserve.api import Announcement, DeadlineExceeded, FanoutSender, Options, SyncSpec, TransportError, TransportSpec
from tpserve.api.sync import HEARTBEAT
from tpserve.plugins.builtin import tpserve_transports
from tpserve.testing.doors import SyncDoorContract
from tpserve.testing.lab import Task, asleep, at_rest, missed, soon
from tpserve.testing.leaving import SyncLeavingContract
from tpserve.testing.rounds import MEDDLING, Meddler, check_rounds, drain
from tpserve.testing.streams import MANY, MEGABYTE, Stream
from tpserve.testing.sync_group import (
    Group,
    announce_until_error,
    hear_until_error,
    hear_until_heartbeat,
    numbered,
    take_rounds,
)
from tpserve.transports.options import GlooOptions

__all__ = ["SyncContract", "fanout_between_processes"]

UNHEARD = 1 << 16
"""A leader that announces so many rounds to a follower that does not listen has no bound."""

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
NUMBERS = (
    *((1 << bits) - 1 for bits in range(64)),
    *(1 << bits for bits in range(63)),
    *map(random.Random(0).getrandbits, [63] * 64),
)
"""A number that loses a bit on its way, be it now and then, is one of these."""


class LittleRoom(GlooOptions, frozen=True, kw_only=True):
    """Few announcements fit into the fan-out, so that a leader is soon too far ahead."""

    send_buffer: int = 100_000


def fanout_between_processes() -> TransportSpec:
    """A fan-out for the fixture ``transport`` of a sync that works over it."""
    gloo = next(spec for spec in tpserve_transports() if spec.name == "gloo")
    return msgspec.structs.replace(gloo, options=LittleRoom)


class SyncContract(SyncDoorContract, SyncLeavingContract):
    """Subclass it, with the fixture ``spec``."""

    pytestmark = pytest.mark.usefixtures("tpserve_guard")

    @pytest.fixture
    def spec(self) -> SyncSpec:
        """The spec of the sync under test."""
        raise NotImplementedError("give your sync's spec in a fixture of this name")

    @pytest.fixture
    def options(self, spec: SyncSpec) -> Options:
        """The options to test with; override it to try others."""
        return spec.options()

    @pytest.fixture
    def transport(self) -> TransportSpec | None:
        """For a sync that works over the fan-out, one that reaches other processes; None: inside this process."""
        return None

    @pytest.fixture
    def group(self, spec: SyncSpec, options: Options, transport: TransportSpec | None) -> Iterator[Group]:
        """Makes the ranks."""
        group = Group(spec, options, transport)
        yield group
        group.close()

    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_every_follower_hears_every_announcement_in_order(self, group: Group, size: int) -> None:
        """Rounds and heartbeats, thousands, with numbers of any length, and none twice."""
        count = MANY if size == 2 else 1200
        said = [
            *(Announcement(number, 3 * number, number % 4, number - 1, number * 7919) for number in range(count)),
            *(
                Announcement(number, number, frames, number, digest)
                for number in NUMBERS
                for frames, digest in [(number, ~number), (HEARTBEAT, number)]
            ),
            Announcement(HIGHEST, HIGHEST, HIGHEST, HIGHEST, LOWEST),
            Announcement(HIGHEST, HIGHEST, HEARTBEAT, -1, HIGHEST),
        ]
        leader, *followers = group.connected(size)
        hearing = [Task(lambda end=end: [end.receive(soon()) for _ in said]) for end in followers]
        for announcement in said:
            leader.announce(announcement, soon())
        for task, end in zip(hearing, followers, strict=True):
            assert task.result() == said
            with pytest.raises(DeadlineExceeded):
                end.receive(time.monotonic() + 0.1)

    def test_the_frames_of_a_round_follow_its_announcement(self, group: Group) -> None:
        """Once each and in order: of rounds without frames, with one, with many, and with large ones."""
        batches = [
            [],
            [b"one"],
            [],
            [b""],
            [bytes([size % 256]) * size for size in range(400)],
            [number.to_bytes(8, "little") for number in range(MANY)],
            [],
            [b"l" * MEGABYTE] * 5,
        ]
        rounds: list[tuple[Announcement, list[bytes]]] = []
        first = 0
        for number, frames in enumerate(batches):
            rounds.append((Announcement(number, first, len(frames), number - 1, 7 * number), frames))
            first += len(frames)
        leader, *followers = group.connected(3)
        following = [Task(take_rounds, end, rounds) for end in followers]
        for announcement, frames in rounds:
            leader.send_round(announcement, frames, soon())
        for task, end in zip(following, followers, strict=True):
            task.result()
            with pytest.raises(DeadlineExceeded):
                end.context.fanout.recv_many(1, time.monotonic() + 0.1)

    def test_rounds_are_the_same_for_every_rank(self, group: Group) -> None:
        """As the ranks of a server use the sync."""
        check_rounds(group.connected(3), in_order=True)

    @MEDDLING
    @pytest.mark.parametrize("victim", [4, 6])
    def test_a_rank_stops_when_somebody_meddles(self, group: Group, way: str, victim: int) -> None:
        """With a frame on its way: an error that names rank and round, and neither a hang nor a wrong round."""
        check_rounds(group.connected(3, lambda fanout: Meddler(fanout, way, victim)), in_order=False)

    @MEDDLING
    def test_an_announcement_that_somebody_meddles_with_is_an_error(self, group: Group, way: str) -> None:
        """Where announcements travel on the fan-out: at once, and never another announcement."""
        meddlers: list[Meddler] = []

        def meddle(fanout: FanoutSender) -> FanoutSender:
            meddlers.append(Meddler(fanout, way, victim=1))
            return meddlers[0]

        leader, follower = group.connected(2, meddle)
        said = [numbered(number) for number in range(4)]
        for announcement in said:
            leader.announce(announcement, soon())
        if not meddlers[0].passed:
            drain(follower)
            pytest.skip("announcements do not travel on the fan-out")
        heard: list[Announcement] = []
        with pytest.raises(TransportError):
            hear_until_error(follower, heard)
        drain(follower)
        assert heard == said[: len(heard)]
        assert len(heard) <= 2

    def test_the_leader_does_not_wait_for_a_follower_that_is_not_yet_there(self, group: Group) -> None:
        """Two rounds are under way at any time."""
        leader, follower = group.connected(2)
        said = [numbered(0), numbered(1)]
        for announcement in said:
            leader.announce(announcement, soon())
        assert [follower.receive(soon()), follower.receive(soon())] == said

    def test_a_leader_far_ahead_waits_until_its_deadline(self, group: Group) -> None:
        """Its lead is bounded, though another follower hears all, and ends with an error."""
        leader, fast, _slow = group.connected(3)
        hearing = Task(hear_until_error, fast, [])
        with pytest.raises(DeadlineExceeded):
            announce_until_error(leader, patience=0.5)
        for rank in (2, 0):
            group.leave(rank)
        with pytest.raises(TransportError):
            hearing.result()

    def test_a_leader_goes_on_as_soon_as_it_is_heard(self, group: Group) -> None:
        """It rests until the slower of two followers has heard more, and nothing is lost."""
        leader, slow, fast = group.connected(3)
        hearing = [Task(hear_until_heartbeat, fast)]
        stream = Stream(lambda number: leader.announce(numbered(number), soon()), UNHEARD)
        ahead = stream.stand_still()
        with at_rest():
            time.sleep(0.5)
        said = [numbered(number) for number in range(2 * ahead + 100)]
        hearing.append(Task(hear_until_heartbeat, slow))
        stream.finish(len(said))
        leader.announce(msgspec.structs.replace(said[-1], count=HEARTBEAT), soon())
        for task in hearing:
            assert task.result() == said

    def test_a_silent_leader_is_an_error_at_the_deadline(self, group: Group) -> None:
        """And not before it."""
        _leader, follower = group.connected(2)
        with missed(0.5) as deadline:
            follower.receive(deadline)
        assert time.monotonic() >= deadline

    def test_a_missing_rank_is_an_error_on_joining(self, group: Group) -> None:
        """At the deadline, whoever is missing; until then the other rests."""
        for rank in (0, 1):
            join = group.apart(2)[rank]
            with at_rest(), missed(0.5) as deadline:
                join(deadline)
            group.renew()

    @pytest.mark.parametrize("late", [0, 1, 2])
    def test_a_barrier_holds_until_all_are_there(self, group: Group, late: int) -> None:
        """Whichever rank is last; every time."""
        ends = group.connected(3)
        for _ in range(10):
            waiting = [Task(end.barrier, soon()) for rank, end in enumerate(ends) if rank != late]
            time.sleep(0.05)
            assert not any(task.is_done for task in waiting)
            ends[late].barrier(soon())
            for task in waiting:
                task.result()

    def test_a_barrier_ends_at_its_deadline(self, group: Group) -> None:
        """With an error, at the leader and at a follower."""
        _leader, follower = group.connected(2)
        with missed(0.3) as deadline:
            follower.barrier(deadline)
        group.renew()
        leader, _follower = group.connected(2)
        with missed(0.3) as deadline:
            leader.barrier(deadline)

    def test_a_stopped_follower_is_an_error_at_the_deadline(self, group: Group) -> None:
        """It has not gone, but does not read."""
        with group.child("sync_follow", size=2, rank=1) as child:
            leader = group.with_process(child, rank=0, size=2)
            child.send(signal.SIGSTOP)
            with pytest.raises(DeadlineExceeded):
                announce_until_error(leader, patience=0.5)

    def test_a_waiting_follower_rests(self, group: Group) -> None:
        """A second of waiting takes next to no CPU time: nothing polls, however seldom."""
        leader, follower = group.connected(2)
        with asleep():
            hearing = Task(follower.receive, soon())
            time.sleep(1)
            leader.announce(numbered(0), soon())
            assert hearing.result() == numbered(0)

    def test_the_options_come_back_as_they_went(self, spec: SyncSpec) -> None:
        """Through plain data, and an unknown one is refused."""
        plain = msgspec.to_builtins(spec.options())
        assert msgspec.convert(plain, spec.options) == spec.options()
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**plain, "no_such_option": 1}, spec.options)
