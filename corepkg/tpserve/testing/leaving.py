"""What the contracts say of those who leave: in order, and by being killed.

Who leaves in order delivers what it accepted. All others hear of an end, whichever it is and whatever they wait for,
and nothing is left of it.
"""

from __future__ import annotations

import math
import signal
import time
from functools import partial

import pytest

from tpserve.api import Closed, DeadlineExceeded, FanoutReceiver, PeerLost, TransportError
from tpserve.testing.lab import (
    SLACK,
    Lab,
    Task,
    await_loss,
    leaks_files,
    leaks_names,
    missed,
    see_closed,
    see_soon_after,
    send_to_the_dead,
    soon,
    wake,
)
from tpserve.testing.links import LinkContract, ends_of, fan_out, with_follower_process
from tpserve.testing.processes import numbered
from tpserve.testing.streams import (
    BRIEFLY,
    MEGABYTE,
    UNBOUNDED,
    Stream,
    difference,
    overrun,
    read_on,
    send_until_error,
    take_numbered,
)
from tpserve.testing.sync_group import Group, announce_until_error, hear_until_error
from tpserve.testing.sync_group import numbered as announcement

__all__ = ["FanoutLeavingContract", "SyncLeavingContract"]


class FanoutLeavingContract(LinkContract):
    """What becomes of the ends of a fan-out when one closes or is killed."""

    def test_a_leader_that_closes_delivers_first(self, lab: Lab, fanout: None) -> None:
        """All that was accepted arrives, though it is read late; then the follower hears that the leader has gone."""
        address, transport = lab.address(), lab.transport()
        leader, follower = transport.fanout_sender(address, 1), lab.transport().fanout_receiver(address, 0, 1)
        joining = Task(follower.connect, soon())
        leader.connect(soon())
        joining.result()
        frames = [numbered(number, 10_000) for number in range(300)]

        def lead() -> None:
            leader.send_many(frames, soon())
            leader.close()
            if lab.spec.capabilities.multi_process:
                transport.close()

        leading = Task(lead)
        time.sleep(0.3)
        assert difference(follower.recv_many(300, soon()), frames) is None
        with pytest.raises(PeerLost):
            follower.recv_many(1, soon())
        leading.result()

    @pytest.mark.parametrize("leaving", range(4))
    def test_a_follower_that_closes_is_an_error_at_the_leader(self, lab: Lab, fanout: None, leaving: int) -> None:
        """Whichever of four it is: PeerLost, not a deadline."""
        leader, *ends = fan_out(lab, 4)
        left = ends.pop(leaving)
        reading = [Task(_read_and_close, end) for end in ends]
        left.close()
        with pytest.raises(PeerLost):
            send_until_error(lambda frame: leader.send_many([frame], soon()), pause=0.01)
        leader.close()
        for task in reading:
            assert isinstance(task.result(), PeerLost)

    @pytest.mark.parametrize("batches", [[], [3], [3, 1]])
    def test_ends_of_a_fan_out_close_twice_and_are_then_closed(
        self, lab: Lab, fanout: None, batches: list[int]
    ) -> None:
        """And each call after that says so, though frames wait to be taken, or none are asked for."""
        leader, follower = fan_out(lab, 1)
        for count in batches:
            leader.send_many([b"frame"] * count, soon())
        follower.recv_many(min(1, len(batches)), soon())
        for end in (follower, leader):
            end.close()
            end.close()
        see_closed(
            lambda deadline: leader.send_many([b"late"], deadline),
            lambda deadline: leader.send_many([], deadline),
            lambda deadline: follower.recv_many(1, deadline),
            lambda deadline: follower.recv_many(0, deadline),
        )

    def test_closed_ends_join_no_fan_out(self, lab: Lab, fanout: None) -> None:
        """They say so, and a leader does not take one for a follower that came."""
        leader, follower = ends_of(lab, 1)
        follower.close()
        with missed(0.5, "0 of 1") as deadline:
            leading = Task(leader.connect, deadline)
            see_closed(follower.connect, lambda deadline: follower.recv_many(1, deadline))
            leading.result()
        alone = lab.transport().fanout_sender(lab.address(), 1)
        alone.close()
        see_closed(alone.connect, lambda deadline: alone.send_many([b"late"], deadline))

    def test_closing_wakes_a_follower_that_waits(self, lab: Lab, fanout: None) -> None:
        """From another thread, as a process that stops does it: for a frame, and for a leader."""
        _leader, follower = fan_out(lab, 1)
        assert wake(lambda: follower.recv_many(1, math.inf), follower.close)
        alone = lab.transport().fanout_receiver(lab.address(), 0, 1)
        assert wake(lambda: alone.connect(math.inf), alone.close)

    def test_closing_wakes_a_leader_that_waits(self, lab: Lab, fanout: None) -> None:
        """From another thread: for followers, and for room. No send begins any more, and what was accepted arrives."""
        alone = lab.transport().fanout_sender(lab.address(), 1)
        assert wake(lambda: alone.connect(math.inf), alone.close)
        leader, follower = fan_out(lab, 1)
        stream = Stream(lambda number: leader.send_many([numbered(number, MEGABYTE)], soon()), UNBOUNDED // MEGABYTE)
        stream.stand_still(BRIEFLY)
        closing = Task(leader.close)
        with pytest.raises(Closed):
            stream.sending.result(SLACK)
        with pytest.raises(Closed):
            leader.send_many([b"late"], soon())
        take_numbered(partial(follower.recv_many, 1), stream.sent)
        closing.result()

    def test_a_leader_closes_once_all_is_taken(self, lab: Lab, fanout: None) -> None:
        """Though it had to wait before."""
        leader, follower = fan_out(lab, 1)
        accepted = overrun(lambda frame, deadline: leader.send_many([frame], deadline))
        take_numbered(partial(follower.recv_many, 1), accepted)
        begun = time.monotonic()
        leader.close()
        see_soon_after(begun)

    @pytest.mark.parametrize("scheme", ["ipc"], indirect=True)
    def test_a_leader_that_closes_again_leaves_the_next_one_alone(self, lab: Lab, fanout: None) -> None:
        """Who has its address now, and still lets followers in."""
        address = lab.address()
        first = lab.transport().fanout_sender(address, 1)
        first.close()
        leader = lab.transport().fanout_sender(address, 1)
        first.close()
        follower = lab.transport().fanout_receiver(address, 0, 1)
        joining = Task(follower.connect, soon())
        leader.connect(soon())
        joining.result()

    def test_ends_close_in_any_order(self, lab: Lab, fanout: None) -> None:
        """Though followers have waited in vain, and others have gone before."""
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            ends = fan_out(lab, 2)
            for follower in ends[1:]:
                with pytest.raises(DeadlineExceeded):
                    follower.recv_many(1, time.monotonic() + 0.05)
            for end in order:
                Task(ends[end].close).result()
                time.sleep(0.05)

    def test_a_killed_follower_is_an_error_at_the_leader(self, lab: Lab, processes: None, fanout: None) -> None:
        """In the middle of a burst, long before any deadline."""
        leader, child = with_follower_process(lab)
        sending = Task(send_until_error, lambda frame: leader.send_many([frame], soon()))
        time.sleep(0.2)
        child.send(signal.SIGKILL)
        await_loss(sending)

    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_killed_follower_is_an_error_though_another_stands_still(
        self, lab: Lab, processes: None, fanout: None, victim: int
    ) -> None:
        """While the leader waits for that one to make room, long before its deadline."""
        address = lab.address()
        child = lab.child("follow", address=address, follower=victim, followers=2)
        leader = lab.transport().fanout_sender(address, 2)
        slow = lab.transport().fanout_receiver(address, 1 - victim, 2)
        joining = Task(slow.connect, soon())
        leader.connect(soon())
        joining.result()
        child.ready()
        stream = Stream(lambda number: leader.send_many([numbered(number, MEGABYTE)], soon()), UNBOUNDED // MEGABYTE)
        stream.stand_still()
        child.send(signal.SIGKILL)
        await_loss(stream.sending)

    @pytest.mark.parametrize("leaving", [0, 1])
    def test_a_follower_that_closes_is_an_error_though_another_stands_still(
        self, lab: Lab, fanout: None, leaving: int
    ) -> None:
        """While the leader waits for that one to make room."""
        leader, *ends = fan_out(lab, 2)
        stream = Stream(lambda number: leader.send_many([numbered(number, MEGABYTE)], soon()), UNBOUNDED // MEGABYTE)
        stream.stand_still()
        ends[leaving].close()
        await_loss(stream.sending)

    def test_a_killed_follower_is_an_error_at_the_next_send(self, lab: Lab, processes: None, fanout: None) -> None:
        """Though the leader had nothing to send when it was killed."""
        leader, child = with_follower_process(lab)
        child.send(signal.SIGKILL)
        child.wait()
        send_to_the_dead(lambda number: leader.send_many([numbered(number)], soon()))

    def test_a_killed_leader_is_an_error_at_the_follower(self, lab: Lab, processes: None, fanout: None) -> None:
        """While it waits, long before any deadline."""
        address = lab.address()
        child = lab.child("lead", address=address, followers=1, count=1)
        follower = lab.transport().fanout_receiver(address, 0, 1)
        follower.connect(soon())
        child.ready()
        assert child.report() == {"sent": 1}
        reading = Task(follower.recv_many, 2, soon())
        child.send(signal.SIGKILL)
        await_loss(reading)

    @pytest.mark.parametrize("still", range(3))
    def test_a_leader_that_closes_is_an_error_though_one_stands_still(self, lab: Lab, fanout: None, still: int) -> None:
        """At the two others of three followers, while they wait."""
        leader, *followers = fan_out(lab, 3)
        reading = [Task(end.recv_many, 1, soon()) for number, end in enumerate(followers) if number != still]
        leader.close()
        for task in reading:
            await_loss(task)

    @pytest.mark.parametrize("still", range(3))
    def test_a_killed_leader_is_an_error_though_one_stands_still(
        self, lab: Lab, processes: None, fanout: None, still: int
    ) -> None:
        """The same, in the middle of what has been sent."""
        address = lab.address()
        child = lab.child("lead", address=address, followers=3, count=1)
        followers = [lab.transport().fanout_receiver(address, number, 3) for number in range(3)]
        for joining in [Task(end.connect, soon()) for end in followers]:
            joining.result()
        child.ready()
        assert child.report() == {"sent": 1}
        reading = [Task(end.recv_many, 2, soon()) for number, end in enumerate(followers) if number != still]
        child.send(signal.SIGKILL)
        for task in reading:
            await_loss(task)

    def test_a_killed_process_leaves_its_address_free(self, lab: Lab, processes: None, fanout: None) -> None:
        """Though not what it had there in the file system."""
        address = lab.address()
        child = lab.child("lead", address=address, followers=1, count=0)
        lab.transport().fanout_receiver(address, 0, 1).connect(soon())
        child.ready()
        child.send(signal.SIGKILL)
        child.wait()
        lab.close_transports()
        leader, follower = fan_out(lab, 1, address)
        leader.send_many([b"new"], soon())
        assert follower.recv_many(1, soon()) == [b"new"]


class SyncLeavingContract:
    """What becomes of ranks when one closes its end or is killed."""

    @pytest.mark.parametrize("waiting", [0, 1])
    def test_a_rank_that_has_gone_is_an_error_at_the_barrier(self, group: Group, waiting: int) -> None:
        """Though it left before the other came: PeerLost, not a deadline."""
        end = group.connected(2)[waiting]
        group.leave(1 - waiting)
        await_loss(Task(end.barrier, soon()))

    def test_a_leader_that_closes_delivers_first(self, group: Group) -> None:
        """What was announced is heard; then the follower learns that the leader has gone."""
        leader, follower = group.connected(2)
        leader.announce(announcement(0), soon())
        leader.announce(announcement(1), soon())
        closing = Task(group.leave, 0)
        time.sleep(0.3)
        assert [follower.receive(soon()), follower.receive(soon())] == [announcement(0), announcement(1)]
        with pytest.raises(PeerLost):
            follower.receive(soon())
        closing.result()

    @pytest.mark.parametrize("leaving", [1, 2, 3])
    def test_a_follower_that_closes_is_an_error_at_the_leader(self, group: Group, leaving: int) -> None:
        """Whichever of three it is: PeerLost, not a deadline."""
        leader, *followers = group.connected(4)
        hearing = [Task(hear_until_error, end, []) for end in followers if end.context.rank != leaving]
        group.leave(leaving)
        with pytest.raises(PeerLost):
            announce_until_error(leader)
        group.leave(0)
        for task in hearing:
            with pytest.raises(TransportError):
                task.result()

    def test_a_killed_leader_is_an_error_at_the_follower(self, group: Group) -> None:
        """While it waits, long before the deadline."""
        with group.child("sync_lead", size=2, count=3) as child:
            follower = group.with_process(child, rank=1, size=2)
            assert child.report() == {"sent": 3}
            hearing = Task(lambda: [follower.receive(soon()) for _ in range(4)])
            child.send(signal.SIGKILL)
            await_loss(hearing)

    def test_a_killed_follower_is_an_error_at_the_leader(self, group: Group) -> None:
        """While it announces, long before the deadline."""
        with group.child("sync_follow", size=2, rank=1) as child:
            leader = group.with_process(child, rank=0, size=2)
            saying = Task(announce_until_error, leader)
            time.sleep(0.2)
            child.send(signal.SIGKILL)
            await_loss(saying)

    def test_a_killed_follower_is_an_error_at_the_next_announcement(self, group: Group) -> None:
        """Though the leader had nothing to say when it was killed."""
        with group.child("sync_follow", size=2, rank=1) as child:
            leader = group.with_process(child, rank=0, size=2)
            child.send(signal.SIGKILL)
            child.wait()
            send_to_the_dead(lambda number: leader.announce(announcement(number), soon()))

    def test_closing_twice_leaves_no_file_and_no_descriptor(self, group: Group) -> None:
        """What a library opens once for the whole process does not count."""

        def use() -> None:
            leader, follower = group.connected(2)
            for number in range(10):
                waiting = Task(follower.barrier, soon())
                leader.barrier(soon())
                waiting.result()
                leader.announce(announcement(number), soon())
                leader.send_round(announcement(number), [b"frame"], soon())
                assert [follower.receive(soon()), follower.receive(soon())] == [announcement(number)] * 2
                assert follower.context.fanout.recv_many(1, soon()) == [b"frame"]
            with pytest.raises(DeadlineExceeded):
                follower.receive(time.monotonic() + 0.05)
            for end in (follower, leader):
                end.close()
                end.close()
            group.renew()

        assert not leaks_files(use)
        assert not leaks_names(use)
        assert group.files() == []


def _read_and_close(end: FanoutReceiver) -> TransportError:
    """Read until there is an error, which is returned, and close then, as is all that can be done."""
    with end:
        return read_on(end)
