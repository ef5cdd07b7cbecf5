"""The IO of tensor-parallel ranks and nothing else: no model, no HTTP.

    python examples/rank_io.py --transport zmq --ranks 3 --messages 50

This process plays the tokenizer: it sends requests to rank 0, sometimes many at once, sometimes none. Rank 0 leads:
it takes what has arrived, announces how much that is and forwards it to the other ranks. Each rank is a process and
works at its own pace. At the end every rank prints the uids that it saw, in order: the same on all, in the same rounds.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tpserve.api import (
    FanoutReceiver,
    FanoutSender,
    PipeReceiver,
    Sync,
    SyncContext,
    Transport,
    TransportCapabilities,
    TransportSpec,
)
from tpserve.envelope import Sealer
from tpserve.errors import ConfigError, UnsupportedByPlugin, UserError
from tpserve.messages import Generate, SamplingParams, Shutdown, encode
from tpserve.plugins.registry import Registry
from tpserve.scheduler.digest import DecisionLog, RoundDecisions
from tpserve.scheduler.round import Caps, FollowerSource, LeaderSource, RoundSource, SingleSource
from tpserve.tokens import pack_ids

PATIENCE = 60.0
HEARTBEAT = 1.0
MOST_RANKS = 64
WATCHDOG = 10.0
TOKENIZER = 1


def main() -> int:
    """Start the ranks, feed them and wait for them."""
    arguments = parse()
    if arguments.rank is not None:
        run_rank(arguments)
        return 0
    try:
        check(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="rank-io-") as directory:
        ranks = [start_rank(arguments, rank, directory) for rank in range(arguments.ranks)]
        try:
            play_tokenizer(arguments, directory)
            return max(rank.wait(PATIENCE) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--transport", default="zmq", help="carries the fan-out, and the pipe if it can")
    parser.add_argument("--pipe-transport", default="zmq", help="carries the pipe where --transport cannot")
    parser.add_argument("--sync", default="gloo", help="announces the rounds")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--messages", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the pauses between messages")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> None:
    """Refuse what the ranks could not do: they would fail one by one, and the tokenizer wait for them.

    Raises:
        UserError: there are no ranks, or a part does not exist, cannot be used, or cannot do what is asked of it here,
            where every rank is a process.
    """
    if not 1 <= arguments.ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks: expected 1 to {MOST_RANKS}, found {arguments.ranks}")
    Registry.discover().load("sync", arguments.sync)
    pipe = pipe_transport(arguments)
    for name in (arguments.transport, pipe):
        can = capabilities(name)
        if not can.multi_process:
            raise UnsupportedByPlugin(f"transport.{name} works inside one process only")
        if name == pipe and not can.pipes:
            raise UnsupportedByPlugin(f"transport.{name} has no pipes")
        if name == arguments.transport and not can.fanout:
            raise UnsupportedByPlugin(f"transport.{name} has no fan-outs")


def start_rank(arguments: argparse.Namespace, rank: int, directory: str) -> subprocess.Popen[bytes]:
    """Start this very file as a rank: a process of its own, not a fork of this one."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in vars(arguments).items() if value is not None]
    return subprocess.Popen([sys.executable, __file__, *flags, f"--rank={rank}", f"--directory={directory}"])


def play_tokenizer(arguments: argparse.Namespace, directory: str) -> None:
    """Send requests in bursts and with pauses, then tell the ranks to stop."""
    draw = random.Random(arguments.seed)
    sealer = Sealer(TOKENIZER)
    with ExitStack() as resources:
        intake = make_transport(pipe_transport(arguments), resources).pipe_sender(f"ipc://{directory}/intake")
        intake.connect(time.monotonic() + PATIENCE)
        for uid in range(arguments.messages):
            prompt = pack_ids(draw.randrange(1000) for _ in range(8))
            request = Generate(uid, prompt, SamplingParams(max_tokens=4, seed=uid))
            intake.send(sealer.seal(encode(request)), time.monotonic() + PATIENCE)
            time.sleep(draw.choice([0, 0, 0, 0.01, 0.05]))
        intake.send(sealer.seal(encode(Shutdown())), time.monotonic() + PATIENCE)


def run_rank(arguments: argparse.Namespace) -> None:
    """Be a rank: take rounds until one says to stop, and work on each for a while."""
    rank = arguments.rank
    log = DecisionLog(rank)
    draw = random.Random(rank)
    rounds: list[list[int]] = []
    with ExitStack() as resources:
        source = make_source(arguments, log, resources)
        stopped = False
        while not stopped:
            messages = source.receive(block=True).messages
            stopped = Shutdown() in messages
            uids = [message.uid for message in messages if isinstance(message, Generate)]
            time.sleep(draw.uniform(0, 0.03))
            log.fold(len(rounds), RoundDecisions(uids=uids))
            rounds.append(uids)
    shown = " | ".join(" ".join(map(str, uids)) for uids in rounds)
    # One write, newline included: the ranks share this stream.
    sys.stdout.write(f"rank {rank}: {shown} (digest {log.latest[1] % (1 << 64):#x})\n")
    sys.stdout.flush()


def make_source(arguments: argparse.Namespace, log: DecisionLog, resources: ExitStack) -> RoundSource:
    """Compose a rank's IO, as the server does: the fan-out, the announcements, and the leader's intake."""
    rank, size = arguments.rank, arguments.ranks
    if size == 1:
        return SingleSource(make_intake(arguments, resources), Caps())
    fanout = make_fanout(arguments, resources)
    sync = make_sync(arguments, fanout, resources)
    if isinstance(fanout, FanoutSender):
        return LeaderSource(make_intake(arguments, resources), fanout, sync, log, Caps(), HEARTBEAT, WATCHDOG)
    return FollowerSource(fanout, sync, log, WATCHDOG, rank)


def make_intake(arguments: argparse.Namespace, resources: ExitStack) -> PipeReceiver:
    """What the tokenizer sends to; once it is there, the tokenizer begins."""
    return make_transport(pipe_transport(arguments), resources).pipe_receiver(f"ipc://{arguments.directory}/intake")


def make_fanout(arguments: argparse.Namespace, resources: ExitStack) -> FanoutSender | FanoutReceiver:
    """This rank's end of the fan-out."""
    transport = make_transport(arguments.transport, resources)
    address, followers = f"ipc://{arguments.directory}/fanout", arguments.ranks - 1
    fanout: FanoutSender | FanoutReceiver = (
        transport.fanout_receiver(address, arguments.rank - 1, followers)
        if arguments.rank
        else transport.fanout_sender(address, followers)
    )
    fanout.connect(time.monotonic() + PATIENCE)
    return fanout


def make_sync(arguments: argparse.Namespace, fanout: FanoutSender | FanoutReceiver, resources: ExitStack) -> Sync:
    """This rank's end of the announcements."""
    plugin = Registry.discover().load("sync", arguments.sync)
    context = SyncContext(arguments.rank, arguments.ranks, Path(arguments.directory), "sync", fanout)
    sync: Sync = plugin.factory()(plugin.make_options({}), context)
    resources.callback(sync.close)
    sync.connect(time.monotonic() + PATIENCE)
    return sync


def pipe_transport(arguments: argparse.Namespace) -> str:
    """The transport of the pipe from the tokenizer to rank 0."""
    name: str = arguments.transport
    if not capabilities(name).pipes:
        name = arguments.pipe_transport
    return name


def capabilities(name: str) -> TransportCapabilities:
    """What a transport can do."""
    spec = Registry.discover().load("transport", name).spec
    assert isinstance(spec, TransportSpec)
    return spec.capabilities


def make_transport(name: str, resources: ExitStack) -> Transport:
    """Load a transport plugin, with its default options."""
    plugin = Registry.discover().load("transport", name)
    transport: Transport = plugin.factory()(plugin.make_options({}))
    resources.callback(transport.close)
    return transport


if __name__ == "__main__":
    sys.exit(main())
