"""The contract of fan-outs as tests."""

from __future__ import annotations

import math
import random
import signal
import time
from functools import partial

import pytest

from tpserve.api import Closed, DeadlineExceeded, FanoutReceiver, PeerLost, TransportError
from tpserve.testing.lab import (
    SLACK,
    Lab,
    Task,
    at_rest,
    await_loss,
    burnt_cpu,
    memory,
    missed,
    refused,
    see_soon_after,
    send_to_the_dead,
    soon,
    wake,
)
from tpserve.testing.links import (
    ALL_SCHEMES,
    BRIEFLY,
    CHUNK,
    EDGES,
    LARGE,
    LONG,
    MANY,
    MEGABYTE,
    UNBOUNDED,
    LinkContract,
    Stream,
    burst_at_a_standstill,
    cut,
    difference,
    ends_of,
    fan_out,
    overrun,
    overrun_empty,
    overrun_large,
    read_on,
    see_nothing_kept,
    send_until_error,
    take_in_cuts,
    take_numbered,
    with_follower_process,
)
from tpserve.testing.processes import number_of, numbered

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

    def test_ends_of_a_fan_out_close_twice_and_are_then_closed(self, lab: Lab, fanout: None) -> None:
        """And a call after that says so."""
        leader, follower = fan_out(lab, 1)
        for end in (leader, follower):
            end.close()
            end.close()
        with pytest.raises(Closed):
            leader.send_many([b"late"], soon())
        with pytest.raises(Closed):
            follower.recv_many(1, soon())

    def test_closing_wakes_a_follower_that_waits(self, lab: Lab, fanout: None) -> None:
        """From another thread, as a process that stops does it: for a frame, and for a leader."""
        _leader, follower = fan_out(lab, 1)
        assert wake(lambda: follower.recv_many(1, math.inf), follower.close)
        alone = lab.transport().fanout_receiver(lab.address(), 0, 1)
        assert wake(lambda: alone.connect(math.inf), alone.close)

    def test_closing_wakes_a_leader_that_waits(self, lab: Lab, fanout: None) -> None:
        """From another thread: for followers, and for room, which nobody makes any more."""
        alone = lab.transport().fanout_sender(lab.address(), 1)
        assert wake(lambda: alone.connect(math.inf), alone.close)
        leader, follower = fan_out(lab, 1)
        stream = Stream(lambda number: leader.send_many([numbered(number, MEGABYTE)], soon()), UNBOUNDED // MEGABYTE)
        stream.stand_still(BRIEFLY)
        closing = Task(leader.close)
        with pytest.raises(Closed):
            stream.sending.result()
        follower.close()
        closing.result()

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

    def test_a_waiting_follower_rests(self, lab: Lab, fanout: None) -> None:
        """A second of waiting takes less than a tenth of one in CPU time: nothing polls."""
        _leader, follower = fan_out(lab, 1)

        def wait() -> None:
            with pytest.raises(DeadlineExceeded):
                follower.recv_many(1, time.monotonic() + 1)

        assert burnt_cpu(wait) < 0.1


def _read_and_close(end: FanoutReceiver) -> TransportError:
    """Read until there is an error, which is returned, and close then, as is all that can be done."""
    with end:
        return read_on(end)
