"""What the contracts of fan-outs and of pipes share: fixtures, and links between threads and processes."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Barrier
from typing import Any

import pytest

from tpserve.api import FanoutSender, Options, PipeSender, Transport, TransportError, TransportSpec
from tpserve.testing.lab import Lab, Task, can_listen, soon
from tpserve.testing.processes import Child

__all__ = [
    "ALL_SCHEMES",
    "LinkContract",
    "ends_of",
    "fan_out",
    "first_of_two",
    "pipe",
    "with_follower_process",
    "with_receiver_process",
]

RACES = 20
"""How often two come at once: a fault shows in some of them."""

HEAD_START = 1e-4
"""Seconds that one of the two is behind the other, at most."""

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


def first_of_two(lab: Lab, followers: int) -> Iterator[tuple[str, Any]]:
    """Addresses, and the binding end there of the one of two threads that has got it: of a pipe, if without followers.

    Both come at almost the same instant, a few times; where a killed process has left what it had, if that can be.
    """
    addresses = [lab.address() for _ in range(RACES)]
    if lab.spec.capabilities.multi_process:
        killed = lab.child("occupy", addresses=addresses, followers=followers).ready()
        killed.send(signal.SIGKILL)
        killed.wait()
    transports, draw = [lab.transport() for _ in range(2)], random.Random(followers)
    for address in addresses:
        together = Barrier(2)

        def bind(transport: Transport, delay: float, address: str = address, together: Barrier = together) -> Any:
            together.wait()
            time.sleep(delay)
            return transport.fanout_sender(address, followers) if followers else transport.pipe_receiver(address)

        ends = []
        with _switching_often():
            for task in [Task(bind, transport, HEAD_START * draw.random()) for transport in transports]:
                with suppress(TransportError):
                    ends.append(task.result())
        assert len(ends) == 1, f"{len(ends)} of two have {address}"
        yield address, ends[0]


@contextmanager
def _switching_often() -> Iterator[None]:
    """Let threads run by turns, as processes do, and not one for milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


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
