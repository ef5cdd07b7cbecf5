"""The contract of the ``transport`` kind as tests: subclass :class:`TransportContract` and give it your spec.

class TestMine(TransportContract):
    @pytest.fixture
    def spec(self):
        return plugin.tpserve_transports()[0]

Every guarantee of :mod:`tpserve.api.transport` is tried: in threads, each with a transport of its own as if it were a
process, and, where the transport reaches that far, in processes that are stopped and killed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import metadata

import msgspec
import pytest

from tpserve.api import (
    Closed,
    DeadlineExceeded,
    FanoutReceiver,
    FanoutSender,
    NoOptions,
    SyncContext,
    TransportError,
    TransportSpec,
)
from tpserve.sync.inband import InbandSync
from tpserve.testing.fanout import FanoutContract
from tpserve.testing.lab import Lab, Task, leaks_files, soon
from tpserve.testing.links import fan_out, pipe
from tpserve.testing.pipes import PipeContract
from tpserve.testing.rounds import MEDDLING, Meddler, check_rounds

__all__ = ["TransportContract"]

HEAVY = ("torch", "zmq", "pynng", "flashinfer", "triton")


class TransportContract(FanoutContract, PipeContract):
    """Subclass it, with the fixture ``spec``, whose capabilities say what is tried."""

    def test_rounds_are_the_same_for_every_rank(self, lab: Lab) -> None:
        """As the ranks of a server use the fan-out."""
        self._check_rounds(lab, *fan_out(lab, 2), in_order=True)

    @MEDDLING
    def test_a_rank_stops_when_somebody_meddles(self, lab: Lab, way: str) -> None:
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
            leader, follower = fan_out(lab, 1)
            for _ in range(10):
                leader.send_many([b"frame"], soon())
                follower.recv_many(1, soon())
            with pytest.raises(DeadlineExceeded):
                follower.recv_many(1, time.monotonic() + 0.05)
            with pytest.raises(DeadlineExceeded):
                lab.transport().fanout_receiver(lab.address(), 0, 1).connect(time.monotonic() + 0.05)
            if lab.spec.capabilities.pipes:
                receiver, sender = pipe(lab, 1)
                for _ in range(10):
                    sender.send(b"frame", soon())
                    receiver.recv_many(1, 1, soon())
                receiver.recv_many(1, 1, time.monotonic() + 0.05)
            lab.close_transports()

        assert not leaks_files(use)
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
