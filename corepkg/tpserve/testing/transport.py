"""The contract of the ``transport`` kind as tests: subclass :class:`TransportContract` and give it your spec.

class TestMine(TransportContract):
    @pytest.fixture
    def spec(self):
        return plugin.tpserve_transports()[0]

Every guarantee of :mod:`tpserve.api.transport` is tried: in threads, each with a transport of its own as if it were a
process, and, where the transport reaches that far, in processes that are stopped and killed.
"""

from __future__ import annotations

import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, ClassVar

import msgspec
import pytest

from tpserve.api import (
    Closed,
    DeadlineExceeded,
    FanoutReceiver,
    FanoutSender,
    Options,
    PeerLost,
    PipeSender,
    TransportError,
    TransportSpec,
)
from tpserve.testing.lab import Lab, Task, burnt_cpu, open_files, soon, wake
from tpserve.testing.processes import Child, number_of, numbered

__all__ = ["TransportContract"]

MEGABYTE = 1 << 20
UNBOUNDED = 1 << 30
"""A sender that gets so far ahead of a reader that does not read has no bound."""
HEAVY = ("torch", "zmq", "pynng", "flashinfer", "triton")


ALL_SCHEMES = pytest.mark.parametrize("scheme", ["ipc", "tcp"], indirect=True)


class TransportContract:
    """Subclass it, with the fixture ``spec``.

    Attributes:
        schemes: kinds of address to try, ``ipc`` and ``tcp``.
    """

    pytestmark = pytest.mark.usefixtures("tpserve_guard")

    schemes: ClassVar[Sequence[str]] = ("ipc",)

    @pytest.fixture
    def spec(self) -> TransportSpec:
        """The spec of the transport under test."""
        raise NotImplementedError("give your transport's spec in a fixture of this name")

    @pytest.fixture
    def options(self, spec: TransportSpec) -> Options:
        """The options to test with; override it to try others."""
        return spec.options()

    @pytest.fixture
    def scheme(self, request: pytest.FixtureRequest) -> str:
        """The kind of address."""
        scheme: str = getattr(request, "param", self.schemes[0])
        if scheme not in self.schemes:
            pytest.skip(f"{type(self).__name__} does not try {scheme} addresses")
        return scheme

    @pytest.fixture
    def lab(self, spec: TransportSpec, options: Options, scheme: str) -> Iterator[Lab]:
        """Makes transports and addresses."""
        lab = Lab(spec, options, scheme)
        yield lab
        lab.close()

    @pytest.fixture
    def processes(self, spec: TransportSpec) -> None:
        """For tests that need processes."""
        if not spec.capabilities.multi_process:
            pytest.skip(f"{spec.name} works inside one process")

    @pytest.fixture
    def pipes(self, spec: TransportSpec) -> None:
        """For tests that need pipes."""
        if not spec.capabilities.pipes:
            pytest.skip(f"{spec.name} has no pipes")

    # The fan-out.

    @ALL_SCHEMES
    @pytest.mark.parametrize("followers", [1, 2, 4])
    def test_followers_see_the_same_sequence_however_it_is_cut(self, lab: Lab, followers: int) -> None:
        """Frames of all sizes, sent in batches of any length and taken in others."""
        draw = random.Random(followers)
        sizes = [0, 1, 7, 300, 70_000, 3 * MEGABYTE, *draw.choices([0, 5, 300, 5_000, 300_000], k=60)]
        frames = [draw.randbytes(size) for size in sizes]
        leader, *ends = fan_out(lab, followers)
        reading = [Task(take_in_cuts, end, len(frames), random.Random(seed)) for seed, end in enumerate(ends)]
        for batch in cut(frames, draw):
            leader.send_many(batch, soon())
        for task in reading:
            assert task.result() == frames

    @pytest.mark.slow
    def test_a_frame_of_64_mb(self, lab: Lab) -> None:
        """Large frames, several times what a buffer holds."""
        frames = [bytes([number]) * (64 * MEGABYTE) for number in range(3)]
        leader, follower = fan_out(lab, 1)
        reading = Task(follower.recv_many, 3, soon())
        leader.send_many(frames, soon())
        assert reading.result() == frames

    def test_an_empty_batch_sends_nothing(self, lab: Lab) -> None:
        """Neither does asking for no frames take any."""
        leader, follower = fan_out(lab, 1)
        leader.send_many([], soon())
        leader.send_many([b"first"], soon())
        assert follower.recv_many(0, soon()) == []
        assert follower.recv_many(1, soon()) == [b"first"]

    @pytest.mark.slow
    def test_cold_starts(self, lab: Lab) -> None:
        """What is sent at the instant that the link is ready arrives, at every follower, every time."""
        for start in range(50):
            leader, *ends = ends_of(lab, 2)
            sending = Task(lambda leader=leader: (leader.connect(soon()), leader.send_many([b"at once"], soon())))
            joining = [Task(lambda end=end: (end.connect(soon()), end.recv_many(1, soon()))) for end in ends]
            sending.result()
            assert [task.result()[1] for task in joining] == [[b"at once"]] * 2, f"start {start}"
            lab.close_transports()

    def test_a_missing_follower_is_an_error_at_the_leader(self, lab: Lab) -> None:
        """At the deadline, saying how many came."""
        leader, present, _absent = ends_of(lab, 2)
        joining = Task(present.connect, time.monotonic() + 1)
        with pytest.raises(DeadlineExceeded, match="1 of 2"):
            leader.connect(time.monotonic() + 0.5)
        with pytest.raises(TransportError):
            joining.result()

    def test_a_missing_leader_is_an_error_at_the_follower(self, lab: Lab) -> None:
        """At the deadline."""
        with pytest.raises(DeadlineExceeded):
            lab.transport().fanout_receiver(lab.address(), 0, 1).connect(time.monotonic() + 0.2)

    def test_a_deadline_loses_no_frame(self, lab: Lab) -> None:
        """What came before the deadline is there for the next call."""
        leader, follower = fan_out(lab, 1)
        leader.send_many([numbered(0), numbered(1)], soon())
        with pytest.raises(DeadlineExceeded):
            follower.recv_many(3, time.monotonic() + 0.3)
        with pytest.raises(DeadlineExceeded):
            follower.recv_many(3, 0.0)
        leader.send_many([numbered(2), numbered(3)], soon())
        assert [number_of(frame) for frame in follower.recv_many(4, soon())] == [0, 1, 2, 3]

    def test_a_sender_far_ahead_waits_until_its_deadline(self, lab: Lab) -> None:
        """Its lead has a bound in bytes, and ends with an error."""
        leader, _follower = fan_out(lab, 1)
        assert overrun(lambda frame, deadline: leader.send_many([frame], deadline)) > 0

    def test_a_sender_goes_on_as_soon_as_it_is_read(self, lab: Lab) -> None:
        """Waiting for room loses nothing, with two followers of different speed."""
        leader, slow, fast = fan_out(lab, 2)
        numbers = list(range(200))
        sending = Task(lambda: [leader.send_many([numbered(number, MEGABYTE)], soon()) for number in numbers])
        quick = Task(fast.recv_many, len(numbers), soon())
        time.sleep(0.3)
        for number in numbers:
            assert number_of(slow.recv_many(1, soon())[0]) == number
        assert [number_of(frame) for frame in quick.result()] == numbers
        sending.result()

    def test_a_leader_that_closes_delivers_first(self, lab: Lab) -> None:
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
        assert follower.recv_many(300, soon()) == frames
        with pytest.raises(PeerLost):
            follower.recv_many(1, soon())
        leading.result()

    def test_a_follower_that_closes_is_an_error_at_the_leader(self, lab: Lab) -> None:
        """PeerLost, not a deadline."""
        leader, staying, leaving = fan_out(lab, 2)
        reading = Task(read_on, staying)
        leaving.close()
        with pytest.raises(PeerLost):
            send_until_error(lambda frame: leader.send_many([frame], soon()), pause=0.01)
        leader.close()
        assert isinstance(reading.result(), PeerLost)

    def test_ends_of_a_fan_out_close_twice_and_are_then_closed(self, lab: Lab) -> None:
        """And a call after that says so."""
        leader, follower = fan_out(lab, 1)
        for end in (leader, follower):
            end.close()
            end.close()
        with pytest.raises(Closed):
            leader.send_many([b"late"], soon())
        with pytest.raises(Closed):
            follower.recv_many(1, soon())

    @pytest.mark.slow
    def test_a_stopped_follower_gets_a_burst_later(self, lab: Lab, processes: None) -> None:
        """20,000 frames to a reader that stands still: none is lost."""
        leader, child = with_follower_process(lab, count=20_000)
        child.send(signal.SIGSTOP)
        sending = Task(lambda: [leader.send_many([numbered(number)], soon()) for number in range(20_000)])
        time.sleep(1)
        child.send(signal.SIGCONT)
        assert child.report() == {"received": 20_000, "in_order": True}
        sending.result()

    def test_a_killed_follower_is_an_error_at_the_leader(self, lab: Lab, processes: None) -> None:
        """In the middle of a burst, long before any deadline."""
        leader, child = with_follower_process(lab, count=10_000_000)
        sending = Task(send_until_error, lambda frame: leader.send_many([frame], soon()))
        time.sleep(0.2)
        child.send(signal.SIGKILL)
        with pytest.raises(PeerLost):
            sending.result()

    def test_a_killed_leader_is_an_error_at_the_follower(self, lab: Lab, processes: None) -> None:
        """While it waits, long before any deadline."""
        address = lab.address()
        child = lab.child("lead", address=address, followers=1, count=1)
        follower = lab.transport().fanout_receiver(address, 0, 1)
        follower.connect(soon())
        child.ready()
        assert child.report() == {"sent": 1}
        reading = Task(follower.recv_many, 2, soon())
        child.send(signal.SIGKILL)
        with pytest.raises(PeerLost):
            reading.result()

    def test_a_killed_process_leaves_its_address_free(self, lab: Lab, processes: None) -> None:
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

    def test_a_waiting_follower_rests(self, lab: Lab) -> None:
        """A second of waiting takes less than a tenth of one in CPU time: nothing polls."""
        _leader, follower = fan_out(lab, 1)

        def wait() -> None:
            with pytest.raises(DeadlineExceeded):
                follower.recv_many(1, time.monotonic() + 1)

        assert burnt_cpu(wait) < 0.1

    # Pipes.

    @ALL_SCHEMES
    def test_a_pipe_keeps_the_order_of_each_sender(self, lab: Lab, pipes: None) -> None:
        """Three senders at once, frames of all sizes, none lost."""
        receiver, *senders = pipe(lab, 3)
        draw = random.Random(3)
        sizes = [8, 9, 300, 70_000, 3 * MEGABYTE, *draw.choices([8, 300, 5_000, 300_000], k=60)]

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
            assert mine == [numbered(name * 1000 + number, size) for number, size in enumerate(sizes)]

    def test_a_pipe_takes_what_is_there_and_no_more(self, lab: Lab, pipes: None) -> None:
        """Up to a number of frames, or of bytes; without waiting once there is a first."""
        receiver, sender = pipe(lab, 1)
        assert receiver.recv_many(10, 1 << 20, 0) == []
        assert receiver.recv_many(10, 1 << 20, time.monotonic() + 0.2) == []
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
        """At the deadline."""
        with pytest.raises(DeadlineExceeded):
            lab.transport().pipe_sender(lab.address()).connect(time.monotonic() + 0.3)

    def test_a_pipe_sender_far_ahead_waits_and_may_try_again(self, lab: Lab, pipes: None) -> None:
        """What was refused at the deadline was not sent; what was accepted arrives, and nothing twice."""
        receiver, sender = pipe(lab, 1)
        accepted = overrun(sender.send)
        taken = receiver.recv_many(1, 1, soon())
        sender.send(numbered(accepted), soon())
        while len(taken) <= accepted:
            taken += receiver.recv_many(100, 1 << 30, soon())
        assert [number_of(frame) for frame in taken] == list(range(accepted + 1))
        assert receiver.recv_many(1, 1, time.monotonic() + 0.2) == []

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
        address = lab.address()
        child = lab.child("collect", address=address)
        sender = lab.transport().pipe_sender(address)
        sender.connect(soon())
        child.ready()
        sending = Task(send_until_error, lambda frame: sender.send(frame, soon()))
        time.sleep(0.2)
        child.send(signal.SIGKILL)
        with pytest.raises(PeerLost):
            sending.result()

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

    def test_ends_of_a_pipe_close_twice_and_are_then_closed(self, lab: Lab, pipes: None) -> None:
        """And a call after that says so."""
        receiver, sender = pipe(lab, 1)
        for end in (sender, receiver):
            end.close()
            end.close()
        with pytest.raises(Closed):
            sender.send(b"late", soon())
        with pytest.raises(Closed):
            receiver.recv_many(1, 1, soon())

    def test_a_waiting_receiver_rests(self, lab: Lab, pipes: None) -> None:
        """A second of waiting takes less than a tenth of one in CPU time: nothing polls."""
        receiver, _sender = pipe(lab, 1)
        assert burnt_cpu(lambda: receiver.recv_many(1, 1, time.monotonic() + 1)) < 0.1

    # The package.

    def test_closing_leaves_no_file_and_no_descriptor(self, lab: Lab) -> None:
        """What a library opens once for the whole process does not count."""

        def use() -> None:
            leader, follower = fan_out(lab, 1)
            leader.send_many([b"frame"], soon())
            follower.recv_many(1, soon())
            if lab.spec.capabilities.pipes:
                receiver, sender = pipe(lab, 1)
                sender.send(b"frame", soon())
                receiver.recv_many(1, 1, soon())
            lab.close_transports()

        use()
        before = open_files()
        use()
        assert open_files() <= before
        assert list(lab.directory.iterdir()) == []

    def test_an_address_that_cannot_be_taken_is_an_error(self, lab: Lab, processes: None) -> None:
        """And not a crash."""
        with pytest.raises(TransportError):
            lab.transport().fanout_sender(f"ipc://{lab.directory}/missing/{'long' * 50}", 1)

    def test_transports_close_twice(self, lab: Lab) -> None:
        """And close their ends."""
        transport = lab.transport()
        end = transport.fanout_receiver(lab.address(), 0, 1)
        transport.close()
        transport.close()
        with pytest.raises(Closed):
            end.recv_many(1, soon())

    def test_the_options_come_back_as_they_went(self, spec: TransportSpec) -> None:
        """Through plain data, and an unknown one is refused."""
        plain = msgspec.to_builtins(spec.options())
        assert msgspec.convert(plain, spec.options) == spec.options()
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**plain, "no_such_option": 1}, spec.options)

    def test_the_plugin_module_is_light(self, spec: TransportSpec) -> None:
        """Reading the spec imports neither the implementation nor any heavy library."""
        (module,) = {
            entry.module for entry in metadata.entry_points(group="tpserve", name=f"transport.{spec.name}")
        } or {type(self).__module__}
        unwanted = [*HEAVY, spec.factory.partition(":")[0]]
        code = f"import sys, {module}; print([name for name in {unwanted!r} if name in sys.modules])"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "[]"


def ends_of(lab: Lab, followers: int, address: str = "") -> list[Any]:
    """A leader's end and its followers', not connected."""
    address = address or lab.address()
    leader = lab.transport().fanout_sender(address, followers)
    return [leader, *(lab.transport().fanout_receiver(address, index, followers) for index in range(followers))]


def fan_out(lab: Lab, followers: int, address: str = "") -> list[Any]:
    """A leader's end and its followers', connected."""
    leader, *ends = ends_of(lab, followers, address)
    joining = [Task(end.connect, soon()) for end in ends]
    leader.connect(soon())
    for task in joining:
        task.result()
    return [leader, *ends]


def pipe(lab: Lab, senders: int) -> list[Any]:
    """A receiver's end and its senders', connected."""
    address = lab.address()
    receiver = lab.transport().pipe_receiver(address)
    ends = [lab.transport().pipe_sender(address) for _ in range(senders)]
    for end in ends:
        end.connect(soon())
    return [receiver, *ends]


def with_follower_process(lab: Lab, count: int) -> tuple[FanoutSender, Child]:
    """A leader's end here, and a process that follows."""
    address = lab.address()
    child = lab.child("follow", address=address, follower=0, followers=1, count=count)
    leader = lab.transport().fanout_sender(address, 1)
    leader.connect(soon())
    return leader, child.ready()


def cut(frames: Sequence[bytes], draw: random.Random) -> Iterator[Sequence[bytes]]:
    """Cut a sequence into batches of random length, empty ones among them."""
    start = 0
    while start < len(frames):
        end = start + draw.randrange(12)
        yield frames[start:end]
        start = end


def take_in_cuts(end: FanoutReceiver, count: int, draw: random.Random) -> list[bytes]:
    """Take frames in batches of random length."""
    frames: list[bytes] = []
    while len(frames) < count:
        frames += end.recv_many(min(draw.randrange(12), count - len(frames)), soon())
    return frames


def read_on(end: FanoutReceiver) -> TransportError:
    """Read frame by frame until there is an error, and return that."""
    try:
        while True:
            end.recv_many(1, soon())
    except TransportError as error:
        return error


def overrun(send: Callable[[bytes, float], object]) -> int:
    """Send to nobody who reads until the deadline refuses a frame; how many were accepted."""
    for number in range(UNBOUNDED // MEGABYTE):
        try:
            send(numbered(number, MEGABYTE), time.monotonic() + 0.5)
        except DeadlineExceeded:
            return number
    pytest.fail(f"a sender got {UNBOUNDED} bytes ahead")


def send_until_error(send: Callable[[bytes], object], pause: float = 0) -> None:
    """Send for as long as it goes."""
    end = soon()
    number = 0
    while time.monotonic() < end:
        send(numbered(number))
        number += 1
        time.sleep(pause)
