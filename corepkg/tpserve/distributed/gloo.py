"""Gloo groups without torch.distributed's global state, on the loopback interface only."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpserve.errors import DeadlineExceeded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo

    from tpserve.distributed.files import FileExchange

__all__ = ["leave", "make_group"]

PATIENCE = 5
"""Gloo gives a peer so many times its time-out to connect."""

LEAST = 0.001
"""It counts whole milliseconds, and takes 0 for "as long as usual"."""


UNUSED_TAG = 1 << 16


def make_group(
    path: Path,
    rank: int,
    size: int,
    timeout: float,
    join_timeout: float | None = None,
    look: Callable[[], None] = lambda: None,
) -> ProcessGroupGloo:
    """Join a gloo group whose members meet in the directory ``path``; returns when all have come.

    A path is good for one group, once. Nothing is left there when all have met, or all have given up.

    Args:
        path: the same for all members, in a directory that is private to this user.
        rank: this member, 0 ≤ rank < size.
        size: how many members there are.
        timeout: seconds after which a collective operation gives up; sends and receives wait as long as they are told.
        join_timeout: seconds to wait for the others; as ``timeout`` if None.
        look: called again and again while others are awaited; what it raises ends that. Not while gloo connects with
            those who have come, which takes a moment unless one of them is stopped in it.

    Raises:
        DeadlineExceeded: not all came.
        PeerLost: another member has given up.
    """
    from tpserve.distributed.files import FileExchange

    deadline = time.monotonic() + (timeout if join_timeout is None else join_timeout)
    exchange = FileExchange(path, rank, deadline, look)
    came, tried, met = ([f"{word}/{member}" for member in range(size)] for word in ("came", "tried", "met"))
    try:
        exchange.set(came[rank], b"")
        exchange.wait(came)
        # Only now does gloo begin to count, so that those who come late do not make it later still.
        group, failure = None, None
        try:
            group = _connect(exchange, rank, size, max(LEAST, (deadline - time.monotonic()) / PATIENCE))
        except RuntimeError as error:
            failure = error
        if group is None or not exchange.conclude(met):
            look()
            others = exchange.silent(tried, met)
            raise DeadlineExceeded(f"rank {rank} waited in vain to connect with {others} at {path}") from failure
    except BaseException:
        exchange.withdraw(of_all=rank == 0)
        raise
    group.set_timeout(timedelta(seconds=timeout))
    return group


def leave(group: Any) -> None:
    """End what is under way and close all connections: gloo does both when somebody has waited in vain.

    Nobody waits for a rank that has gone already, so every other rank is tried until one lets us wait.
    """
    import torch

    if group is None:
        return
    others = (rank for rank in range(group.size()) if rank != group.rank())
    for other in others:
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], other, UNUSED_TAG).wait(timedelta(milliseconds=1))


def _connect(exchange: FileExchange, rank: int, size: int, timeout: float) -> ProcessGroupGloo:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # An address and not an interface's name: torch would listen on the host name's address otherwise. And not lazily,
    # because addresses are to be had only now.
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1
    return ProcessGroupGloo(exchange, rank, size, options)
