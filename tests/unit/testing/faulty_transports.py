"""Transports that each break one promise, made from the inproc one; and the contract applied to the one in FAULT."""

import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest
from tests.unit.testing import faulty_ends as ends
from tests.unit.testing import faulty_pipe_ends as pipe_ends

from tpserve.api import (
    DeadlineExceeded,
    PeerLost,
    TransportCapabilities,
    TransportError,
    TransportSpec,
    UnsupportedByPlugin,
)
from tpserve.api.ends import Ends
from tpserve.testing.transport import TransportContract
from tpserve.transports.inproc import InprocTransport


class Sound(InprocTransport):
    """Breaks nothing; subclasses say what wraps which end."""

    fanout_out: type = ends.Sender
    fanout_in: type | None = None
    pipe_out: type | None = None
    pipe_in: type | None = None

    def fanout_sender(self, address, followers):
        return self.fanout_out(super().fanout_sender(address, followers))

    def fanout_receiver(self, address, follower, followers):
        end = super().fanout_receiver(address, follower, followers)
        return self.fanout_in(end) if self.fanout_in else end

    def pipe_sender(self, address):
        end = super().pipe_sender(address)
        return self.pipe_out(end) if self.pipe_out else end

    def pipe_receiver(self, address):
        end = super().pipe_receiver(address)
        return self.pipe_in(end) if self.pipe_in else end


class Losing(Sound):
    fanout_out = ends.LosingSender


class SeldomLosing(Sound):
    fanout_out = ends.SeldomLosingSender
    pipe_out = pipe_ends.SeldomLosingPipeSender


class Wraparound(Sound):
    fanout_out = ends.WrappingSender


class Deaf(Sound):
    fanout_in = ends.DeafReceiver


class Bare(Sound):
    fanout_out = ends.BareSender
    pipe_out = pipe_ends.BarePipeSender


class Lingering(Sound):
    fanout_out = ends.LingeringSender
    pipe_out = pipe_ends.LingeringPipeSender


class Accepting(Sound):
    fanout_out = ends.AcceptingSender
    pipe_out = pipe_ends.AcceptingPipeSender


class Serving(Sound):
    fanout_in = ends.ServingReceiver
    pipe_in = pipe_ends.ServingPipeReceiver


class UnaskingToSend(Sound):
    fanout_out = ends.UnaskingSender


class Unasking(Sound):
    fanout_in = ends.UnaskingReceiver
    pipe_in = pipe_ends.UnaskingPipeReceiver


class Fragile(Sound):
    fanout_out = ends.FragileSender
    pipe_out = pipe_ends.FragilePipeSender


class RejoiningToLead(Sound):
    fanout_out = ends.RejoiningSender


class Rejoining(Sound):
    fanout_in = ends.RejoiningReceiver
    pipe_out = pipe_ends.RejoiningPipeSender


class Littering(Sound):
    def fanout_sender(self, address, followers):
        sender = super().fanout_sender(address, followers)
        return ends.LitteringSender(sender, Path(address.removeprefix("ipc://")))


class Miscounting(Sound):
    fanout_out = ends.MiscountingSender


class MiscountingToo(Sound):
    fanout_in = ends.MiscountingReceiver


class Fraying(Sound):
    fanout_out = ends.FrayingSender
    pipe_out = pipe_ends.FrayingPipeSender


class FrayingTogether(Sound):
    fanout_out = ends.FrayingTogetherSender


class Doubling(Sound):
    fanout_out = ends.DoublingSender


class Swapping(Sound):
    fanout_out = ends.SwappingSender


class Cutting(Sound):
    fanout_out = ends.CuttingSender


class Forgetting(Sound):
    fanout_out = ends.ForgettingSender


class Hasty(Sound):
    fanout_out = ends.HastySender


class Polling(Sound):
    fanout_in = ends.PollingReceiver


class Napping(Sound):
    fanout_in = ends.NappingReceiver


class PollingToSend(Sound):
    fanout_out = ends.PollingSender
    pipe_out = pipe_ends.PollingPipeSender


class PollingToJoin(Sound):
    fanout_in = ends.PollingJoiner


class Turning(Sound):
    fanout_out = ends.TurningSender
    pipe_out = pipe_ends.TurningPipeSender


class Keeping(Sound):
    fanout_in = ends.KeepingReceiver
    pipe_in = ends.KeepingReceiver


class Forgetful(Sound):
    fanout_in = ends.ForgetfulReceiver


class Careless(Sound):
    pipe_out = pipe_ends.CarelessSender


class Sleepy(Sound):
    pipe_in = pipe_ends.SleepyReceiver


class LateLeader(Sound):
    fanout_out = ends.LateSender


class LateFollower(Sound):
    fanout_in = ends.LateReceiver


class LatePipe(Sound):
    pipe_out = pipe_ends.LatePipeSender
    pipe_in = pipe_ends.LatePipeReceiver


class Naming(Sound):
    fanout_out = ends.NamingSender


class Lending(Sound):
    fanout_in = ends.LendingReceiver
    pipe_in = pipe_ends.LendingPipeReceiver


class Eager(Sound):
    fanout_in = ends.EagerReceiver


class Narrow(Sound):
    """While it waits for a follower it does not see that another leaves."""

    def fanout_sender(self, address, followers):
        end = super().fanout_sender(address, followers)
        for queue in end.sender._queues:
            queue.siblings = [queue]
        return end


class NarrowAmongFour(Sound):
    """Does not hear of the third follower that it has gone."""

    def fanout_sender(self, address, followers):
        end = super().fanout_sender(address, followers)
        heard = [queue for number, queue in enumerate(end.sender._queues) if number != 2]
        for queue in end.sender._queues:
            queue.siblings = heard
        return end


class Relaying(Sound):
    """Tells a follower by way of the one before it that the leader has gone."""

    def __init__(self, options):
        super().__init__(options)
        self.told = defaultdict(Event)

    def fanout_receiver(self, address, follower, followers):
        end = super().fanout_receiver(address, follower, followers)
        receive = end.recv_many

        def receive_and_tell(count, deadline):
            try:
                return receive(count, deadline)
            except PeerLost:
                if follower and not self.told[address, follower - 1].wait(deadline - time.monotonic()):
                    raise DeadlineExceeded("nothing came") from None
                self.told[address, follower].set()
                raise

        end.recv_many = receive_and_tell
        return end


class Outliving(Sound):
    """Takes from an address, whenever it closes, whatever is there."""

    def fanout_sender(self, address, followers):
        return self.clearing(super().fanout_sender(address, followers), f"{address}.0")

    def pipe_receiver(self, address):
        return self.clearing(super().pipe_receiver(address), address)

    def clearing(self, end, name):
        close = end.close

        def clear():
            close()
            self._queues.pop(name, None)

        end.close = clear
        return end


class Usurping(Sound):
    """Gives an address to who comes last."""

    def fanout_sender(self, address, followers):
        self.forget(f"{address}.0")
        return super().fanout_sender(address, followers)

    def pipe_receiver(self, address):
        self.forget(address)
        return super().pipe_receiver(address)

    def forget(self, name):
        if self._queue(name).has_leader or self._queue(name).has_reader:
            del self._queues[name]


class Hasting(Usurping):
    """Looks whether an address is free, and takes it a moment later."""

    def fanout_sender(self, address, followers):
        if self._queue(f"{address}.0").has_leader:
            raise TransportError(f"{address} has a leader already")
        time.sleep(0.05)
        return super().fanout_sender(address, followers)

    def pipe_receiver(self, address):
        if self._queue(address).has_reader:
            raise TransportError(f"{address} has a receiver already")
        time.sleep(0.05)
        return super().pipe_receiver(address)


class Hospitable(Sound):
    """Lets everybody in who says the number of a follower."""

    def fanout_receiver(self, address, follower, followers):
        end = super().fanout_receiver(address, follower, followers)
        connect = end.connect

        def welcome(deadline):
            with suppress(TransportError):
                connect(deadline)

        end.connect = welcome
        return end


class Touchy(Sound):
    """Takes the end of somebody it refused for that of a follower."""

    def fanout_receiver(self, address, follower, followers):
        end = super().fanout_receiver(address, follower, followers)
        close = end.close

        def leave():
            close()
            end._queue.change(reader_left=True)

        end.close = leave
        return end


class Undying(Sound):
    """Makes ends after its own end."""

    def close(self):
        super().close()
        self._ends = Ends()


class Trampling(Sound):
    """Makes way for itself."""

    def fanout_sender(self, address, followers):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        return super().fanout_sender(address, followers)


class Wrapping(Sound):
    """Takes any number for a follower's."""

    def fanout_receiver(self, address, follower, followers):
        return super().fanout_receiver(address, follower % followers, followers)


class Sharing(Sound):
    """Lets two be one follower, and each of them two."""

    def fanout_sender(self, address, followers):
        return super().fanout_sender(address, 1)


class Unparsing(Sound):
    """Takes any text for an address."""

    def fanout_sender(self, address, followers):
        return super().fanout_sender(f"ipc:///any/{address}", followers)


class PipesOnly(InprocTransport):
    """Has no fan-outs, and says so: that breaks nothing."""

    def fanout_sender(self, address, *others):
        raise UnsupportedByPlugin("there are no fan-outs")

    fanout_receiver = fanout_sender


class Hiding(Sound):
    """Has fan-outs and pipes, and does not say so."""


class Boastful(Sound):
    """Says that it reaches other machines."""


INSIDE = TransportCapabilities(fanout=True, pipes=True, multi_process=False)
CAPABILITIES = {
    "PipesOnly": TransportCapabilities(fanout=False, pipes=True, multi_process=False),
    "Hiding": TransportCapabilities(fanout=False, pipes=False, multi_process=False),
    "Boastful": TransportCapabilities(fanout=True, pipes=True, multi_node=True),
}


class TestFaulty(TransportContract):
    @pytest.fixture
    def spec(self):
        return TransportSpec(
            name="faulty",
            summary="breaks a promise",
            factory=f"{__name__}:{os.environ['FAULT']}",
            capabilities=CAPABILITIES.get(os.environ["FAULT"], INSIDE),
        )
