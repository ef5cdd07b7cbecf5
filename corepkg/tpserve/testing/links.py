"""What the contracts of fan-outs and of pipes share: fixtures, links in every state, and frames to send over them."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from tpserve.api import (
    DeadlineExceeded,
    FanoutReceiver,
    FanoutSender,
    Options,
    PipeSender,
    TransportError,
    TransportSpec,
)
from tpserve.testing.lab import Lab, Task, can_listen, memory, see_soon_after, soon
from tpserve.testing.processes import Child, number_of, numbered

__all__ = [
    "ALL_SCHEMES",
    "CHUNK",
    "MANY",
    "MEGABYTE",
    "LinkContract",
    "burst_at_a_standstill",
    "cut",
    "difference",
    "ends_of",
    "fan_out",
    "overrun",
    "pipe",
    "read_on",
    "overrun_empty",
    "send_until_error",
    "take_in_cuts",
    "take_numbered",
    "with_follower_process",
    "with_receiver_process",
]

MANY, CHUNK = 5000, 50
"""Frames of a longer test, and how many are taken at a time."""

MEGABYTE = 1 << 20
UNBOUNDED = 1 << 30
"""A sender that gets so far ahead of a reader that does not read has no bound."""

UNCOUNTED = 1 << 24
"""And so has one that gets as many empty frames ahead: they take memory too."""

BURST_SIZE, BATCH = 4096, 5
STANDSTILL = 0.4
"""Seconds after which a sender that has not moved waits for room."""

Item = TypeVar("Item")

ALL_SCHEMES = pytest.mark.parametrize("scheme", ["ipc", "tcp", "tcp6"], indirect=True)


class LinkContract:
    """What the contracts of both kinds of link begin with."""

    pytestmark = pytest.mark.usefixtures("tpserve_guard")

    @pytest.fixture
    def spec(self) -> TransportSpec:
        """The spec of the transport under test."""
        raise NotImplementedError("give your transport's spec in a fixture of this name")

    @pytest.fixture
    def options(self, spec: TransportSpec) -> Options:
        """The options to test with; override it to try others."""
        return spec.options()

    @pytest.fixture
    def scheme(self, request: pytest.FixtureRequest, spec: TransportSpec) -> str:
        """The kind of address."""
        offered = spec.capabilities.schemes
        scheme: str = getattr(request, "param", offered[0])
        if scheme not in offered:
            pytest.skip(f"{spec.name} offers no {scheme} addresses")
        if not can_listen(scheme):
            pytest.skip(f"this machine has no {scheme} addresses")
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
    def fanout(self, spec: TransportSpec) -> None:
        """For tests that need fan-outs."""
        if not spec.capabilities.fanout:
            pytest.skip(f"{spec.name} has no fan-outs")

    @pytest.fixture
    def pipes(self, spec: TransportSpec) -> None:
        """For tests that need pipes."""
        if not spec.capabilities.pipes:
            pytest.skip(f"{spec.name} has no pipes")


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


def with_follower_process(lab: Lab) -> tuple[FanoutSender, Child]:
    """A leader's end here, and a process that follows."""
    address = lab.address()
    child = lab.child("follow", address=address, follower=0, followers=1)
    leader = lab.transport().fanout_sender(address, 1)
    leader.connect(soon())
    return leader, child.ready()


def with_receiver_process(lab: Lab) -> tuple[PipeSender, Child]:
    """A pipe's sender here, and a process that receives."""
    address = lab.address()
    child = lab.child("collect", address=address)
    sender = lab.transport().pipe_sender(address)
    sender.connect(soon())
    return sender, child.ready()


def cut(frames: Sequence[Item], draw: random.Random) -> Iterator[Sequence[Item]]:
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


def take_numbered(take: Callable[[float], Sequence[bytes]], count: int) -> None:
    """Take frames that are numbered from 0, and see each to be the next: what is missing shows at once."""
    taken = 0
    while taken < count:
        for frame in take(soon()):
            assert number_of(frame) == taken, f"frame {number_of(frame)} comes where {taken} is due"
            taken += 1


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
        deadline = time.monotonic() + 0.5
        try:
            send(numbered(number, MEGABYTE), deadline)
        except DeadlineExceeded:
            see_soon_after(deadline)
            return number
    pytest.fail(f"a sender got {UNBOUNDED} bytes ahead")


def burst_at_a_standstill(send: Callable[[Sequence[bytes], float], object], child: Child) -> int:
    """Stop a process that reads, send until there is no room left, and go on when it reads: 20,000 frames at least.

    While nothing moves, this process may have taken memory for what it has accepted, and no more.

    Returns:
        How many frames were sent, 10,000 of them after it had to wait.
    """
    sent = 0
    last: float = math.inf

    def send_on() -> None:
        nonlocal sent
        while sent < last:
            send([numbered(number, BURST_SIZE) for number in range(sent, sent + BATCH)], soon())
            sent += BATCH

    child.send(signal.SIGSTOP)
    before, seen = memory(), -1
    sending = Task(send_on)
    while seen < sent < UNBOUNDED // BURST_SIZE:
        seen = sent
        time.sleep(STANDSTILL)
    taken, last = memory() - before, max(20_000, sent + 10_000)
    child.send(signal.SIGCONT)
    sending.result()
    assert seen * BURST_SIZE < UNBOUNDED, f"a sender got {UNBOUNDED} bytes ahead"
    assert taken <= _most_memory(seen, BURST_SIZE), f"{seen} frames of {BURST_SIZE} bytes take {taken} bytes"
    return sent


def overrun_empty(leader: FanoutSender, child: Child) -> None:
    """Stop a process that reads, and send empty frames until the deadline refuses them."""
    child.send(signal.SIGSTOP)
    before = memory()
    for count in range(0, UNCOUNTED, 1000):
        try:
            leader.send_many([b""] * 1000, time.monotonic() + STANDSTILL)
        except DeadlineExceeded:
            taken = memory() - before
            assert taken <= _most_memory(count, 0), f"{count} empty frames take {taken} bytes"
            return
    pytest.fail(f"a sender got {UNCOUNTED} empty frames ahead")


def send_until_error(send: Callable[[bytes], object], pause: float = 0, most: float = math.inf) -> None:
    """Send for as long as it goes, or so many frames."""
    end = soon()
    number = 0
    while number < most and time.monotonic() < end:
        send(numbered(number))
        number += 1
        time.sleep(pause)


def difference(taken: Sequence[bytes], sent: Sequence[bytes]) -> str | None:
    """Where what was taken is not what was sent; None if it is. In words, for frames may be large."""
    for number, (found, expected) in enumerate(zip(taken, sent, strict=False)):
        if not isinstance(found, bytes):
            return f"frame {number}: a {type(found).__name__}, not bytes"
        if found != expected:
            return (
                f"frame {number}: {len(found)} bytes that begin {found[:16]!r}, not {len(expected)}, {expected[:16]!r}"
            )
    return None if len(taken) == len(sent) else f"{len(taken)} frames, not {len(sent)}"


def _most_memory(frames: int, size: int) -> float:
    """Bytes that so many frames may take: some more than their content, and what every frame costs."""
    return 1.5 * frames * size + 256 * frames + 64 * MEGABYTE
