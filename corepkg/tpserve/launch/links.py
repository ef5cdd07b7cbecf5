"""The links between the ranks of one group: the fan-out and the count synchronisation over it."""

from __future__ import annotations

from contextlib import ExitStack

from tpserve.api import FanoutReceiver, FanoutSender, Sync, SyncContext, Transport
from tpserve.launch.compose import Part, load_part
from tpserve.launch.layout import Layout

__all__ = ["join_fanout", "join_sync"]


def join_fanout(
    part: Part, layout: Layout, rank: int, size: int, resources: ExitStack, deadline: float
) -> FanoutSender | FanoutReceiver:
    """Make a rank's end of the fan-out and wait for the others; ``resources`` closes its transport.

    Raises:
        DeadlineExceeded: they did not come.
    """
    transport: Transport = load_part(part)()
    resources.callback(transport.close)
    address, followers = layout.fanout, size - 1
    fanout = (
        transport.fanout_sender(address, followers)
        if rank == 0
        else transport.fanout_receiver(address, rank - 1, followers)
    )
    fanout.connect(deadline)
    return fanout


def join_sync(
    part: Part, layout: Layout, rank: int, size: int, fanout: FanoutSender | FanoutReceiver, deadline: float
) -> Sync:
    """Make a rank's end of the count synchronisation and wait for the others.

    Raises:
        DeadlineExceeded: they did not come.
    """
    context = SyncContext(rank=rank, size=size, run_dir=layout.directory, name=layout.name("sync"), fanout=fanout)
    sync: Sync = load_part(part)(context)
    sync.connect(deadline)
    return sync
