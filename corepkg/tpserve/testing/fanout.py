"""The contract of fan-outs as tests."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest

from tpserve.api import DeadlineExceeded, PeerLost, TransportError
from tpserve.testing.lab import SLACK, Lab, Task, asleep, at_rest, memory, missed, refused, see_soon_after, soon
from tpserve.testing.links import ALL_SCHEMES, LinkContract, ends_of, fan_out, first_of_two, with_follower_process
from tpserve.testing.processes import number_of, numbered
from tpserve.testing.streams import (
    CHUNK,
    EDGES,
    LARGE,
    LONG,
    MANY,
    MEGABYTE,
    UNBOUNDED,
    Stream,
    burst_at_a_standstill,
    cut,
    difference,
    overrun,
    overrun_empty,
    overrun_large,
    read_on,
    see_nothing_kept,
    take_in_cuts,
    take_numbered,
)

__all__ = ["FanoutContract"]


class FanoutContract(LinkContract):
    """What :class:`tpserve.api.FanoutSender` and :class:`tpserve.api.FanoutReceiver` promise."""

    @ALL_SCHEMES
    @pytest.mark.parametrize("followers", [1, 2, 4])
    def test_followers_see_the_same_sequence_however_it_is_cut(self, lab: Lab, followers: int, fanout: None) -> None:
        """Frames of all sizes, sent in batches of any length, one by one and all at once, and taken in others."""
        draw = random.Random(followers)
        sizes = [0, 1, 7, 300, 70_000, 3 * MEGABYTE, *draw.choices([0, 5, 300, 5_000, 300_000], k=60)]
        mixed, edges = [draw.randbytes(size) for size in sizes], [draw.randbytes(size) for size in EDGES]
        batches = [*cut(mixed, draw), *([frame] for frame in edges), edges]
        frames = [frame for batch in batches for frame in batch]
        leader, *ends = fan_out(lab, followers)
        reading = [Task(take_in_cuts, end, len(frames), random.Random(seed)) for seed, end in enumerate(ends)]
        for batch in batches:
            leader.send_many(batch, soon())
        for task in reading:
            assert difference(task.result(), frames) is None

    def test_many_small_frames_arrive_once_and_in_order(self, lab: Lab, fanout: None) -> None:
        """Enough of them that one lost in a thousand is noticed; in many calls and then in one, at either end."""
        leader, *ends = fan_out(lab, 2)
        frames = [numbered(number, 64) for number in range(2 * MANY)]
        reading = [
            Task(take_numbered, partial(end.recv_many, count), len(frames))
            for end, count in zip(ends, (CHUNK, MANY), strict=True)
        ]
        for batch in [*cut(frames[:MANY], random.Random(MANY)), frames[MANY:]]:
            leader.send_many(batch, soon())
        for task in reading:
            task.result()

    def test_a_long_run_of_frames_arrives_once_and_in_order(self, lab: Lab, fanout: None) -> None:
        """More than 16 bits count, in large calls."""
        leader, follower = fan_out(lab, 1)
        frames = [numbered(number, 8) for number in range(LONG)]
        reading = Task(take_numbered, partial(follower.recv_many, MANY), LONG)
        for start in range(0, LONG, MANY):
            leader.send_many(frames[start : start + MANY], soon())
        reading.result()

    @pytest.mark.slow
    def test_a_frame_of_64_mb(self, lab: Lab, fanout: None) -> None:
        """And others that are large, with every byte in its place: several times what a buffer holds."""
        frames = [numbered(number, size * MEGABYTE) for number, size in enumerate(LARGE)]
        leader, follower = fan_out(lab, 1)
        reading = Task(follower.recv_many, len(frames), soon())
        leader.send_many(frames, soon())
        wrong = difference(reading.result(), frames)
        assert wrong is None, wrong  # in two steps: pytest would write all frames out

    def test_an_empty_batch_sends_nothing(self, lab: Lab, fanout: None) -> None:
        """Neither does asking for no frames take any, or wait for one."""
        leader, follower = fan_out(lab, 1)
        leader.send_many([], soon())
        begun = time.monotonic()
        assert follower.recv_many(0, begun + 2 * SLACK) == []
        see_soon_after(begun)
        leader.send_many([b"first"], soon())
        assert follower.recv_many(0, soon()) == []
        assert follower.recv_many(1, soon()) == [b"first"]

    @pytest.mark.slow
    def test_cold_starts(self, lab: Lab, fanout: None) -> None:
        """What is sent at the instant that the link is ready arrives, at every follower, every time."""
        for start in range(50):
            leader, *ends = ends_of(lab, 2)
            sending = Task(lambda leader=leader: (leader.connect(soon()), leader.send_many([b"at once"], soon())))
            joining = [Task(lambda end=end: (end.connect(soon()), end.recv_many(1, soon()))) for end in ends]
            sending.result()
            assert [task.result()[1] for task in joining] == [[b"at once"]] * 2, f"start {start}"
            lab.close_transports()

    def test_a_missing_follower_is_an_error_at_the_leader(self, lab: Lab, fanout: None) -> None:
        """At the deadline, saying how many came; the one that is there and the leader rest meanwhile."""
        leader, present, _absent = ends_of(lab, 2)
        joining = Task(present.connect, time.monotonic() + 1)
        with at_rest(), missed(0.5, "1 of 2") as deadline:
            leader.connect(deadline)
        with pytest.raises(TransportError):
            joining.result()

    def test_each_follower_is_one_of_them(self, lab: Lab, fanout: None) -> None:
        """An end of another number is refused, and does not pass for one of those that are waited for."""
        address = lab.address()
        for follower in (2, -1):
            with refused(address):
                lab.transport().fanout_receiver(address, follower, 2).connect(time.monotonic() + 0.3)

    def test_two_of_the_same_number_are_not_two_followers(self, lab: Lab, fanout: None) -> None:
        """Not all have come."""
        address = lab.address()
        leader = lab.transport().fanout_sender(address, 2)
        first, again = (lab.transport().fanout_receiver(address, 0, 2) for _ in range(2))
        joining = [Task(end.connect, time.monotonic() + 0.5) for end in (first, again)]
        with pytest.raises(TransportError):
            leader.connect(time.monotonic() + 0.5)
        for task in joining:
            with pytest.raises(TransportError):
                task.result()

    def test_a_second_of_the_same_number_that_comes_late_is_refused(self, lab: Lab, fanout: None) -> None:
        """And the first hears nothing of it."""
        address = lab.address()
        leader, follower = fan_out(lab, 1, address)
        with pytest.raises(TransportError), lab.transport().fanout_receiver(address, 0, 1) as again:
            again.connect(time.monotonic() + 0.3)
        leader.send_many([numbered(0)], soon())
        assert [number_of(frame) for frame in follower.recv_many(1, soon())] == [0]

    def test_a_missing_leader_is_an_error_at_the_follower(self, lab: Lab, fanout: None) -> None:
        """At the deadline; until then the follower rests."""
        follower = lab.transport().fanout_receiver(lab.address(), 0, 1)
        with at_rest(), missed(0.5) as deadline:
            follower.connect(deadline)

    def test_a_deadline_loses_no_frame(self, lab: Lab, fanout: None) -> None:
        """What came before the deadline is there for the next call."""
        leader, follower = fan_out(lab, 1)
        leader.send_many([numbered(0), numbered(1)], soon())
        with missed(0.3) as deadline:
            follower.recv_many(3, deadline)
        with missed(0.0):
            follower.recv_many(3, 0.0)
        leader.send_many([numbered(2), numbered(3)], soon())
        assert [number_of(frame) for frame in follower.recv_many(4, soon())] == [0, 1, 2, 3]

    def test_a_sender_far_ahead_waits_until_its_deadline(self, lab: Lab, fanout: None) -> None:
        """Its lead has a bound in bytes, though another follower reads all, and ends with an error."""
        leader, fast, slow = fan_out(lab, 2)
        reading = Task(read_on, fast)
        assert overrun(lambda frame, deadline: leader.send_many([frame], deadline)) > 0
        for end in (slow, leader):
            end.close()
        assert isinstance(reading.result(), PeerLost)

    def test_a_sender_of_large_frames_waits_too(self, lab: Lab, fanout: None) -> None:
        """The bound of its lead is in bytes, and not in frames."""
        leader, follower = fan_out(lab, 1)
        overrun_large(lambda frame, deadline: leader.send_many([frame], deadline))
        for end in (follower, leader):
            end.close()

    def test_a_sender_goes_on_as_soon_as_it_is_read(self, lab: Lab, fanout: None) -> None:
        """It rests until the slower of two followers has made room, and loses nothing; nobody keeps what was read."""
        leader, slow, fast = fan_out(lab, 2)
        reading = [Task(take_numbered, partial(fast.recv_many, 1))]
        stream = Stream(lambda number: leader.send_many([numbered(number, MEGABYTE)], soon()), UNBOUNDED // MEGABYTE)
        ahead = stream.stand_still()
        with at_rest():
            time.sleep(0.5)
        standing, more = memory(), max(150, 3 * ahead)
        reading.append(Task(take_numbered, partial(slow.recv_many, 1)))
        stream.finish(ahead + more)
        leader.send_many([b""], soon())
        for task in reading:
            task.result()
        see_nothing_kept(standing, more * MEGABYTE)

    @pytest.mark.slow
    def test_a_stopped_follower_gets_a_burst_later(self, lab: Lab, processes: None, fanout: None) -> None:
        """More than a sender may be ahead, to a reader that stands still: memory is bounded and no frame is lost."""
        leader, child = with_follower_process(lab)
        sent = burst_at_a_standstill(leader.send_many, child)
        leader.send_many([b""], soon())
        assert child.report() == {"received": sent, "in_order": True}

    @pytest.mark.slow
    def test_a_sender_of_empty_frames_waits_too(self, lab: Lab, processes: None, fanout: None) -> None:
        """They take memory, and their number has a bound."""
        leader, child = with_follower_process(lab)
        overrun_empty(leader, child)

    @ALL_SCHEMES
    def test_an_address_that_a_leader_has_is_an_error(self, lab: Lab, fanout: None) -> None:
        """At a second leader; the first one goes on."""
        address = lab.address()
        leader = lab.transport().fanout_sender(address, 1)
        with refused(address):
            lab.transport().fanout_sender(address, 1)
        follower = lab.transport().fanout_receiver(address, 0, 1)
        joining = Task(follower.connect, soon())
        leader.connect(soon())
        joining.result()
        leader.send_many([b"first"], soon())
        assert follower.recv_many(1, soon()) == [b"first"]

    @pytest.mark.parametrize("scheme", ["ipc"], indirect=True)
    def test_one_of_two_leaders_that_come_at_once_has_the_address(self, lab: Lab, fanout: None) -> None:
        """Each time, though neither found a living one there; and is the one that a follower reaches."""
        for address, leader in first_of_two(lab, 1):
            follower = lab.transport().fanout_receiver(address, 0, 1)
            joining = Task(follower.connect, soon())
            leader.connect(soon())
            joining.result()
            for end in (follower, leader):
                end.close()

    def test_a_waiting_follower_rests(self, lab: Lab, fanout: None) -> None:
        """A second of waiting takes next to no CPU time: nothing polls, however seldom."""
        _leader, follower = fan_out(lab, 1)
        with asleep(), pytest.raises(DeadlineExceeded):
            follower.recv_many(1, time.monotonic() + 1)
