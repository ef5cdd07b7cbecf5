"""The round as the servers did it that this one descends from, for a baseline.

The leader broadcasts over gloo how many messages there are, an int64, and publishes them one by one over ZeroMQ; a
follower takes part in the broadcast and then receives that many. Frames are opened and decoded as everywhere else, so
that only the way they go differs. Queues are unbounded: at their default marks PUB/SUB drops what is too much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import msgspec

from tpserve.api import PipeReceiver
from tpserve.distributed.gloo import make_group
from tpserve.envelope import Opener
from tpserve.errors import DeadlineExceeded, FrameError, PeerLost, RankError
from tpserve.launch.layout import Layout
from tpserve.messages import RankMessage, decode_ranks
from tpserve.scheduler.round import Caps, Round, RoundSource

__all__ = ["join_ancestor"]

SUBSCRIBED = b"\x01"
SLICE = 0.2


def join_ancestor(
    layout: Layout, rank: int, size: int, intake: PipeReceiver | None, caps: Caps, watchdog: float, resources: ExitStack
) -> RoundSource:
    """Make one rank's end and wait for the others; ``intake`` is the leader's."""
    deadline = time.monotonic() + watchdog
    socket = (
        _publisher(layout, size - 1, resources, deadline) if rank == 0 else _subscriber(layout, resources, watchdog)
    )
    group: Any = make_group(layout.directory / layout.name("sync"), rank, size, watchdog)
    if intake is not None:
        return _Leader(intake, socket, group, caps)
    return _Follower(socket, group, rank, watchdog)


class _Leader(RoundSource):
    def __init__(self, intake: PipeReceiver, socket: Any, group: Any, caps: Caps) -> None:
        self._intake = intake
        self._socket = socket
        self._group = group
        self._caps = caps
        self._decode = partial(_decode, Opener(), 0)
        self._number = 0

    def receive(self, block: bool) -> Round:
        import torch

        frames = self._intake.recv_many(self._caps.messages, self._caps.bytes, math.inf if block else 0.0)
        count = torch.tensor([len(frames)], dtype=torch.int64)
        _broadcast(self._group, count, 0, self._number)
        for frame in frames:
            self._socket.send(frame, copy=len(frame) < 65536)
        number, self._number = self._number, self._number + 1
        return Round(number, self._decode(number, frames))

    def close(self) -> None:
        self._group = None


class _Follower(RoundSource):
    def __init__(self, socket: Any, group: Any, rank: int, watchdog: float) -> None:
        self._socket = socket
        self._group = group
        self._rank = rank
        self._watchdog = watchdog
        self._decode = partial(_decode, Opener(), rank)
        self._number = 0

    def receive(self, block: bool) -> Round:
        import torch
        import zmq

        count = torch.empty(1, dtype=torch.int64)
        _broadcast(self._group, count, self._rank, self._number)
        try:
            frames = [self._socket.recv() for _ in range(int(count.item()))]
        except zmq.Again as error:
            expected = f"{int(count.item())} frames within {self._watchdog:g} s"
            raise RankError(self._rank, self._number, expected, "fewer") from error
        number, self._number = self._number, self._number + 1
        return Round(number, self._decode(number, frames))

    def close(self) -> None:
        self._group = None


def _broadcast(group: Any, count: Any, rank: int, number: int) -> None:
    try:
        group.broadcast(count, 0).wait()
    except RuntimeError as error:
        raise PeerLost(f"rank {rank}, round {number}: the broadcast failed: {error}") from error


def _decode(opener: Opener, rank: int, number: int, frames: Sequence[bytes]) -> list[RankMessage]:
    try:
        return decode_ranks(opener.open_all(frames))
    except (FrameError, msgspec.MsgspecError) as error:
        raise RankError(rank, number, "intact frames in sequence", str(error)) from error


def _publisher(layout: Layout, followers: int, resources: ExitStack, deadline: float) -> Any:
    """Bind, and wait until every follower's subscription is in force: an XPUB shows them, a PUB would not."""
    import zmq

    context = resources.enter_context(zmq.Context())
    socket = resources.enter_context(context.socket(zmq.XPUB))
    socket.set_hwm(0)
    socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, round(1000 * SLICE))
    socket.bind(layout.fanout)
    there = 0
    while there < followers:
        with suppress(zmq.Again):
            there += socket.recv() == SUBSCRIBED
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"{there} of {followers} followers subscribed")
    return socket


def _subscriber(layout: Layout, resources: ExitStack, watchdog: float) -> Any:
    import zmq

    context = resources.enter_context(zmq.Context())
    socket = resources.enter_context(context.socket(zmq.SUB))
    socket.set_hwm(0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.RCVTIMEO, round(1000 * watchdog))
    socket.connect(layout.fanout)
    return socket
