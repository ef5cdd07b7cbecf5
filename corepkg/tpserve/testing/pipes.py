"""The contract of pipes as tests."""

from __future__ import annotations

import math
import random
import signal
import time
from functools import partial

import pytest

from tpserve.api import Closed, DeadlineExceeded, PipeSender
from tpserve.testing.lab import (
    SLACK,
    Lab,
    Task,
    asleep,
    at_rest,
    await_loss,
    memory,
    missed,
    refused,
    see_closed,
    see_soon_after,
    send_to_the_dead,
    soon,
    wake,
)
from tpserve.testing.links import ALL_SCHEMES, LinkContract, first_of_two, pipe, with_receiver_process
from tpserve.testing.processes import number_of, numbered
from tpserve.testing.streams import (
    BRIEFLY,
    CHUNK,
    EDGES,
    LARGE,
    MANY,
    MEGABYTE,
    UNBOUNDED,
    Stream,
    burst_at_a_standstill,
    difference,
    overrun,
    overrun_large,
    see_nothing_kept,
    send_until_error,
    take_numbered,
)

__all__ = ["PipeContract"]

CROWD = 16
"""Senders that come together, as tokenizers do when a server starts."""


class PipeContract(LinkContract):
    """What :class:`tpserve.api.PipeSender` and :class:`tpserve.api.PipeReceiver` promise."""

    @ALL_SCHEMES
    def test_a_pipe_keeps_the_order_of_each_sender(self, lab: Lab, pipes: None) -> None:
        """Three senders at once, frames of all sizes, none lost."""
        receiver, *senders = pipe(lab, 3)
        draw = random.Random(3)
        sizes = [300, 70_000, 3 * MEGABYTE, *draw.choices([8, 300, 5_000, 300_000], k=60), *EDGES[1:]]

        def send(name: int, end: PipeSender) -> None:
            for number, size in enumerate(sizes):
                end.send(numbered(name * 1000 + number, size), soon())

        sending = [Task(send, name, end) for name, end in enumerate(senders)]
        taken: list[bytes] = []
        while len(taken) < 3 * len(sizes):
            taken += receiver.recv_many(10, 1 << 30, soon())
        for task in sending:
            task.result()
        for name in range(3):
            mine = [frame for frame in taken if number_of(frame) // 1000 == name]
            sent = [numbered(name * 1000 + number, size) for number, size in enumerate(sizes)]
            assert difference(mine, sent) is None

    def test_many_small_frames_arrive_by_a_pipe(self, lab: Lab, pipes: None) -> None:
        """Once, in order, and enough of them that one lost in a thousand is noticed."""
        receiver, sender = pipe(lab, 1)
        reading = Task(take_numbered, partial(receiver.recv_many, CHUNK, MEGABYTE), MANY)
        for number in range(MANY):
            sender.send(numbered(number, 64), soon())
        reading.result()

    @pytest.mark.slow
    def test_a_frame_of_64_mb_by_a_pipe(self, lab: Lab, pipes: None) -> None:
        """And others that are large, with every byte in its place."""
        receiver, sender = pipe(lab, 1)
        reading = Task(take_numbered, partial(receiver.recv_many, 1, 1), len(LARGE))
        for number, size in enumerate(LARGE):
            sender.send(numbered(number, size * MEGABYTE), soon())
        reading.result()

    def test_a_pipe_takes_what_is_there_and_no_more(self, lab: Lab, pipes: None) -> None:
        """Up to a number of frames, or of bytes; without waiting once there is a first."""
        receiver, sender = pipe(lab, 1)
        for deadline in (0, time.monotonic() + 0.2):
            begun = time.monotonic()
            assert receiver.recv_many(10, 1 << 20, deadline) == []
            see_soon_after(max(begun, deadline))
        for frame in (b"", b"a" * 100, b"b" * 100, b"c" * 100, b"d"):
            sender.send(frame, soon())
        taken = receiver.recv_many(1, 1 << 20, soon())
        assert taken == [b""]
        time.sleep(0.2)
        assert receiver.recv_many(10, 101, soon()) == [b"a" * 100, b"b" * 100]
        assert receiver.recv_many(10, 1, soon()) == [b"c" * 100]
        assert receiver.recv_many(10, 1 << 20, soon()) == [b"d"]

    @pytest.mark.slow
    def test_cold_starts_of_a_pipe(self, lab: Lab, pipes: None) -> None:
        """What is sent at the instant that the sender is connected arrives, whichever end came first."""
        for start in range(50):
            address = lab.address()
            early = lab.transport().pipe_sender(address) if start % 2 else None
            receiver = lab.transport().pipe_receiver(address)
            sender = early or lab.transport().pipe_sender(address)
            sender.connect(soon())
            sender.send(b"at once", soon())
            assert receiver.recv_many(1, 1, soon()) == [b"at once"], f"start {start}"
            lab.close_transports()

    def test_connecting_waits_for_nobody_who_reads(self, lab: Lab, pipes: None) -> None:
        """Two processes may each make their receiver, then connect to the other's."""
        addresses = [lab.address(), lab.address()]
        transports = [lab.transport(), lab.transport()]
        receivers = [made.pipe_receiver(address) for made, address in zip(transports, addresses, strict=True)]
        senders = [made.pipe_sender(address) for made, address in zip(transports, reversed(addresses), strict=True)]
        for sender in senders:
            sender.connect(soon())
            sender.send(b"hello", soon())
        assert [receiver.recv_many(1, 1, soon()) for receiver in receivers] == [[b"hello"]] * 2

    def test_a_missing_receiver_is_an_error(self, lab: Lab, pipes: None) -> None:
        """At the deadline; until then the sender rests."""
        sender = lab.transport().pipe_sender(lab.address())
        with at_rest(), missed(0.5) as deadline:
            sender.connect(deadline)

    def test_a_pipe_sender_far_ahead_waits_and_may_try_again(self, lab: Lab, pipes: None) -> None:
        """It rests; what was refused was not sent, what was accepted arrives, nothing twice, and nobody keeps it."""
        receiver, sender = pipe(lab, 1)
        accepted = overrun(sender.send)
        with at_rest(), missed(0.5) as deadline:
            sender.send(numbered(accepted, MEGABYTE), deadline)
        standing, more = memory(), max(150, 3 * accepted)
        reading = Task(take_numbered, partial(receiver.recv_many, CHUNK, MEGABYTE))
        for number in range(accepted, accepted + more):
            sender.send(numbered(number, MEGABYTE), soon())
        sender.send(b"", soon())
        reading.result()
        assert receiver.recv_many(1, 1, time.monotonic() + 0.2) == []
        see_nothing_kept(standing, more * MEGABYTE)

    def test_a_crowd_of_senders_is_let_in_together(self, lab: Lab, processes: None, pipes: None) -> None:
        """All have come while the receiver stood still; each is heard when it goes on."""
        address = lab.address()
        child = lab.child("gather", address=address, count=CROWD).ready()
        child.send(signal.SIGSTOP)
        senders = [lab.transport().pipe_sender(address) for _ in range(CROWD)]
        joining = [Task(sender.connect, soon()) for sender in senders]
        time.sleep(BRIEFLY)
        child.send(signal.SIGCONT)
        for number, (task, sender) in enumerate(zip(joining, senders, strict=True)):
            task.result()
            sender.send(numbered(number), soon())
        assert child.report() == {"numbers": list(range(CROWD)), "are_whole": True}

    @pytest.mark.slow
    def test_a_stopped_receiver_gets_a_burst_later(self, lab: Lab, processes: None, pipes: None) -> None:
        """More than a sender may be ahead, to a reader that stands still: memory is bounded and no frame is lost."""
        sender, child = with_receiver_process(lab)
        sent = burst_at_a_standstill(lambda frames, deadline: [sender.send(each, deadline) for each in frames], child)
        sender.send(b"", soon())
        assert child.report() == {"received": sent, "in_order": True}

    def test_a_pipe_sender_of_large_frames_waits_too(self, lab: Lab, pipes: None) -> None:
        """The bound of its lead is in bytes, and not in frames."""
        _receiver, sender = pipe(lab, 1)
        overrun_large(sender.send)

    def test_a_pipe_sender_of_empty_frames_waits_too(self, lab: Lab, pipes: None) -> None:
        """They take memory: where there is no room for others there soon is none for them."""
        _receiver, sender = pipe(lab, 1)
        overrun(sender.send)
        with pytest.raises(DeadlineExceeded):
            send_until_error(lambda frame: sender.send(b"", time.monotonic() + 0.5), most=MEGABYTE // 8)

    def test_a_pipe_sender_that_closes_delivers_first(self, lab: Lab, processes: None, pipes: None) -> None:
        """From a process that sends, closes and leaves before anything is read."""
        address = lab.address()
        receiver = lab.transport().pipe_receiver(address)
        child = lab.child("feed", address=address, count=500).ready()
        time.sleep(0.5)
        taken: list[bytes] = []
        while len(taken) < 500:
            taken += receiver.recv_many(100, 1 << 30, soon())
        assert [number_of(frame) for frame in taken] == list(range(500))
        assert child.report() == {"sent": 500}
        assert child.wait() == 0

    def test_a_killed_receiver_is_an_error_at_the_sender(self, lab: Lab, processes: None, pipes: None) -> None:
        """In the middle of a burst, long before any deadline."""
        sender, child = with_receiver_process(lab)
        sending = Task(send_until_error, lambda frame: sender.send(frame, soon()))
        time.sleep(0.2)
        child.send(signal.SIGKILL)
        await_loss(sending)

    def test_a_killed_receiver_is_an_error_at_the_next_send(self, lab: Lab, processes: None, pipes: None) -> None:
        """Though nothing was under way when it was killed."""
        sender, child = with_receiver_process(lab)
        child.send(signal.SIGKILL)
        child.wait()
        send_to_the_dead(lambda number: sender.send(numbered(number), soon()))

    def test_a_killed_sender_does_not_disturb_the_others(self, lab: Lab, processes: None, pipes: None) -> None:
        """Senders come and go."""
        address = lab.address()
        receiver = lab.transport().pipe_receiver(address)
        sender = lab.transport().pipe_sender(address)
        sender.connect(soon())
        child = lab.child("feed", address=address, count=10_000_000)
        assert len(receiver.recv_many(1, 1, soon())) == 1
        child.send(signal.SIGKILL)
        child.wait()
        sender.send(b"still here", soon())
        taken: list[bytes] = []
        while b"still here" not in taken:
            taken = receiver.recv_many(1000, 1 << 30, soon())
            assert taken, "the other sender's frame is lost"

    def test_closing_wakes_a_waiting_receiver(self, lab: Lab, pipes: None) -> None:
        """From another thread, as a process that stops does it."""
        receiver, _sender = pipe(lab, 1)
        assert wake(lambda: receiver.recv_many(1, 1, math.inf), receiver.close)

    def test_closing_wakes_a_sender_that_waits(self, lab: Lab, pipes: None) -> None:
        """From another thread: for a receiver, and for room. No send begins any more, and what was accepted arrives."""
        alone = lab.transport().pipe_sender(lab.address())
        assert wake(lambda: alone.connect(math.inf), alone.close)
        receiver, sender = pipe(lab, 1)
        stream = Stream(lambda number: sender.send(numbered(number, MEGABYTE), soon()), UNBOUNDED // MEGABYTE)
        stream.stand_still(BRIEFLY)
        closing = Task(sender.close)
        with pytest.raises(Closed):
            stream.sending.result(SLACK)
        with pytest.raises(Closed):
            sender.send(b"late", soon())
        take_numbered(partial(receiver.recv_many, CHUNK, MEGABYTE), stream.sent)
        closing.result()

    def test_a_pipe_sender_closes_once_all_is_taken(self, lab: Lab, pipes: None) -> None:
        """Though it had to wait before."""
        receiver, sender = pipe(lab, 1)
        accepted = overrun(sender.send)
        take_numbered(partial(receiver.recv_many, CHUNK, MEGABYTE), accepted)
        begun = time.monotonic()
        sender.close()
        see_soon_after(begun)

    @pytest.mark.parametrize("scheme", ["ipc"], indirect=True)
    def test_a_receiver_that_closes_again_leaves_the_next_one_alone(self, lab: Lab, pipes: None) -> None:
        """Who has its address now, and still lets senders in."""
        address = lab.address()
        first = lab.transport().pipe_receiver(address)
        first.close()
        receiver = lab.transport().pipe_receiver(address)
        first.close()
        sender = lab.transport().pipe_sender(address)
        sender.connect(soon())
        sender.send(b"first", soon())
        assert receiver.recv_many(1, 1, soon()) == [b"first"]

    @pytest.mark.parametrize("frames", [0, 3])
    def test_ends_of_a_pipe_close_twice_and_are_then_closed(self, lab: Lab, pipes: None, frames: int) -> None:
        """And each call after that says so, though frames wait to be taken, or none are asked for."""
        receiver, sender = pipe(lab, 1)
        for _ in range(frames):
            sender.send(b"frame", soon())
        receiver.recv_many(1, 1, soon() if frames else 0)
        for end in (receiver, sender):
            end.close()
            end.close()
        see_closed(
            lambda deadline: sender.send(b"late", deadline),
            lambda deadline: receiver.recv_many(1, 1, deadline),
            lambda deadline: receiver.recv_many(0, 1, deadline),
        )

    def test_a_closed_sender_joins_no_pipe(self, lab: Lab, pipes: None) -> None:
        """It says so, whether there is a receiver or not."""
        address = lab.address()
        sender = lab.transport().pipe_sender(address)
        sender.close()
        see_closed(sender.connect)
        lab.transport().pipe_receiver(address)
        see_closed(sender.connect, lambda deadline: sender.send(b"late", deadline))

    @ALL_SCHEMES
    def test_an_address_that_a_receiver_has_is_an_error(self, lab: Lab, pipes: None) -> None:
        """At a second receiver; the first one goes on."""
        address = lab.address()
        receiver = lab.transport().pipe_receiver(address)
        with refused(address):
            lab.transport().pipe_receiver(address)
        sender = lab.transport().pipe_sender(address)
        sender.connect(soon())
        sender.send(b"first", soon())
        assert receiver.recv_many(1, 1, soon()) == [b"first"]

    @pytest.mark.parametrize("scheme", ["ipc"], indirect=True)
    def test_one_of_two_receivers_that_come_at_once_has_the_address(self, lab: Lab, pipes: None) -> None:
        """Each time, though neither found a living one there; and is the one that a sender reaches."""
        for address, receiver in first_of_two(lab, 0):
            sender = lab.transport().pipe_sender(address)
            sender.connect(soon())
            sender.send(b"first", soon())
            assert receiver.recv_many(1, 1, soon()) == [b"first"]
            for end in (sender, receiver):
                end.close()

    def test_a_waiting_receiver_rests(self, lab: Lab, pipes: None) -> None:
        """A second of waiting takes next to no CPU time: nothing polls, however seldom."""
        receiver, _sender = pipe(lab, 1)
        with asleep():
            receiver.recv_many(1, 1, time.monotonic() + 1)
