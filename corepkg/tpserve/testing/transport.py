"""The contract of the ``transport`` kind as tests: subclass :class:`TransportContract` and give it your spec.

class TestMine(TransportContract):
    @pytest.fixture
    def spec(self):
        return plugin.tpserve_transports()[0]

Every guarantee of :mod:`tpserve.api.transport` is tried, in the situations that the tests name: in threads, each with a
transport of its own as if it were a process, and, where the transport reaches that far, in processes that are stopped
and killed. Passing proves no more than that: up to four followers, frames up to 64 MB, 70,000 by one link, runs of
seconds. Not tried are waits that take longer, such as one without a deadline (``math.inf``) that ends all the same
after 20 seconds; nor that frames of one send travel together: ``tpserve bench transport`` measures what they cost.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
import pytest

from tpserve.api import (
    Closed,
    DeadlineExceeded,
    FanoutReceiver,
    FanoutSender,
    NoOptions,
    PipeReceiver,
    SyncContext,
    TransportError,
    TransportSpec,
    UnsupportedByPlugin,
)
from tpserve.sync.inband import InbandSync
from tpserve.testing.doors import LinkDoorContract
from tpserve.testing.fanout import FanoutContract
from tpserve.testing.lab import LOOPBACK, Lab, Task, leaks_files, leaks_names, refused, soon
from tpserve.testing.leaving import FanoutLeavingContract
from tpserve.testing.links import ends_of, fan_out, pipe
from tpserve.testing.pipes import PipeContract
from tpserve.testing.rounds import MEDDLING, Meddler, check_rounds

__all__ = ["TransportContract"]

HEAVY = ("torch", "zmq", "pynng", "flashinfer", "triton")
MALFORMED = (
    "",
    "nowhere",
    "foo://x",
    "ipc://",
    "ipc:///",
    "ipc://relative",
    "ipc://{directory}",
    "tcp://host",
    "tcp://host:x",
    "tcp://127.0.0.1:99999",
    "tcp://127.0.0.1:20000/",
    "tcp://127.0.0.1:20000?a=b",
    "tcp://127.0.0.1:20000#a",
    "tcp://user@127.0.0.1:20000",
    "ipc://{directory}/a\nb",
    "ipc://{directory}/\udcff",
    "ipc://{directory}/{long}",
)
LONG = "x" * 256
"""The name of no file."""


class TransportContract(FanoutContract, FanoutLeavingContract, PipeContract, LinkDoorContract):
    """Subclass it, with the fixture ``spec``, whose capabilities say what is tried."""

    def test_rounds_are_the_same_for_every_rank(self, lab: Lab, fanout: None) -> None:
        """As the ranks of a server use the fan-out."""
        self._check_rounds(lab, *fan_out(lab, 2), in_order=True)

    @MEDDLING
    def test_a_rank_stops_when_somebody_meddles(self, lab: Lab, way: str, fanout: None) -> None:
        """With a message on its way: an error that names rank and round, and neither a hang nor a wrong round."""
        leader, *followers = fan_out(lab, 2)
        self._check_rounds(lab, Meddler(leader, way, victim=4), *followers, in_order=False)

    def _check_rounds(self, lab: Lab, *ends: FanoutSender | FanoutReceiver, in_order: bool) -> None:
        contexts = [SyncContext(rank, len(ends), lab.directory, "rounds", end) for rank, end in enumerate(ends)]
        syncs = [InbandSync(NoOptions(), context) for context in contexts]
        for task in [Task(sync.connect, soon()) for sync in syncs]:
            task.result()
        check_rounds(syncs, in_order)
        for sync in syncs:
            sync.close()

    def test_closing_leaves_no_file_and_no_descriptor(self, lab: Lab) -> None:
        """What a library opens once for the whole process does not count."""

        def use() -> None:
            if lab.spec.capabilities.fanout:
                _use_fanout(lab)
            if lab.spec.capabilities.pipes:
                _use_pipe(lab)
            lab.close_transports()

        assert not leaks_files(use)
        assert not leaks_names(use)
        assert list(lab.directory.iterdir()) == []

    def test_an_address_that_cannot_be_taken_is_an_error(self, lab: Lab, processes: None) -> None:
        """And not a crash."""
        address = f"ipc://{lab.directory}/missing/{'long' * 50}"
        first, *_ = _makers(lab, address, offered=True)
        with refused(address):
            first()

    @pytest.mark.parametrize("length", [160, 255])
    def test_an_address_that_is_too_long_is_an_error_at_both_ends(self, lab: Lab, length: int) -> None:
        """If at one: whoever connects need not wait for somebody who cannot come."""
        address = f"ipc://{lab.directory}/{'x' * length}"
        binding, *connecting = _makers(lab, address, offered=True)
        try:
            binding().close()
        except TransportError:
            for make in connecting:
                with refused(address):
                    end = make()
                    if not isinstance(end, PipeReceiver):
                        end.connect(time.monotonic() + 0.5)

    @pytest.mark.parametrize("address", MALFORMED)
    def test_a_malformed_address_is_an_error(self, lab: Lab, address: str) -> None:
        """At every end, when it is made or connected; as often as it is tried, and nothing is left of it."""
        address = address.format(directory=lab.directory, long=LONG)
        for make in _makers(lab, address, offered=True) * 2:
            with refused(address):
                end = make()
                if not isinstance(end, PipeReceiver):
                    end.connect(time.monotonic() + 0.5)
        assert list(lab.directory.iterdir()) == []

    def test_somebody_elses_file_at_an_address_stays(self, lab: Lab) -> None:
        """Whether it is in the way or not."""
        address = f"ipc://{lab.directory}/notes"
        files = [lab.directory / name for name in ("notes", "notes.0")]
        for file in files:
            file.write_text("somebody else's")
        for make in _makers(lab, address, offered=True):
            with suppress(TransportError), make() as end:
                if not isinstance(end, PipeReceiver):
                    end.connect(time.monotonic() + 0.1)
        assert [file.read_text() for file in files if file.exists()] == ["somebody else's"] * 2

    def test_what_it_does_not_offer_is_refused(self, lab: Lab) -> None:
        """As the capabilities say."""
        makers = _makers(lab, lab.address(), offered=False)
        if not makers:
            pytest.skip(f"{lab.spec.name} offers fan-outs and pipes")
        for make in makers:
            with pytest.raises(UnsupportedByPlugin):
                make()

    def test_the_capabilities_do_not_contradict_each_other(self, spec: TransportSpec) -> None:
        """Something is offered, at addresses that are tried here, and other machines are not reached by paths."""
        can = spec.capabilities
        assert can.fanout or can.pipes, "it offers neither fan-outs nor pipes"
        assert can.schemes, "it takes no addresses"
        assert set(can.schemes) <= {"ipc", *LOOPBACK}, "there are no such addresses"
        if can.multi_node:
            assert can.multi_process, "other machines are other processes"
            assert set(can.schemes) & set(LOOPBACK), "it takes no address of another machine"

    def test_transports_close_twice(self, lab: Lab, fanout: None) -> None:
        """And close their ends."""
        transport = lab.transport()
        end = transport.fanout_receiver(lab.address(), 0, 1)
        transport.close()
        transport.close()
        with pytest.raises(Closed):
            end.recv_many(1, soon())

    def test_a_closed_transport_makes_no_ends(self, lab: Lab) -> None:
        """Of any kind that it offers."""
        makers = _makers(lab, lab.address(), offered=True)
        lab.close_transports()
        for make in makers:
            with pytest.raises(Closed):
                make()

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


def _makers(lab: Lab, address: str, offered: bool) -> list[Callable[[], Any]]:
    """What makes each end of what the capabilities offer, one that binds first; or of what they do not offer."""
    transport, can = lab.transport(), lab.spec.capabilities
    fanouts: list[Callable[[], Any]] = [
        partial(transport.fanout_sender, address, 1),
        partial(transport.fanout_receiver, address, 0, 1),
    ]
    pipes: list[Callable[[], Any]] = [
        partial(transport.pipe_receiver, address),
        partial(transport.pipe_sender, address),
    ]
    return [*(fanouts if can.fanout is offered else []), *(pipes if can.pipes is offered else [])]


def _use_fanout(lab: Lab) -> None:
    """Send and receive, wait in vain for a frame, for a leader, and for the second of two followers."""
    leader, follower = fan_out(lab, 1)
    for _ in range(10):
        leader.send_many([b"frame"], soon())
        follower.recv_many(1, soon())
    with pytest.raises(DeadlineExceeded):
        follower.recv_many(1, time.monotonic() + 0.05)
    with pytest.raises(DeadlineExceeded):
        lab.transport().fanout_receiver(lab.address(), 0, 1).connect(time.monotonic() + 0.05)
    leader, present, _absent = ends_of(lab, 2)
    joining = Task(present.connect, time.monotonic() + 0.05)
    with pytest.raises(DeadlineExceeded):
        leader.connect(time.monotonic() + 0.05)
    with pytest.raises(TransportError):
        joining.result()


def _use_pipe(lab: Lab) -> None:
    """Send and receive, and wait in vain."""
    receiver, sender = pipe(lab, 1)
    for _ in range(10):
        sender.send(b"frame", soon())
        receiver.recv_many(1, 1, soon())
    receiver.recv_many(1, 1, time.monotonic() + 0.05)
