"""The payload itself broadcast over gloo: how much it is, and then the bytes.

The classic way to give all ranks of a group the same messages, and measured for that: a collective operation runs on a
worker thread and every round takes two. A packet is a header of two integers, frames and bytes, and a body: the
frames' lengths and the frames, joined.

Operations wait as long as it takes, so a deadline that passes breaks nothing: the operation stays under way, and a
later call takes it up. What ends them is :func:`leave`. A broadcast goes from rank to rank: who waits for one that
stands still, leader or follower, does not see that another has gone. So they look at the leader's file now and then,
which tells.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

from tpserve.api import (
    Closed,
    DeadlineExceeded,
    FanoutReceiver,
    FanoutSender,
    Options,
    PeerLost,
    Transport,
    TransportError,
)
from tpserve.api.addresses import check_follower, ipc_path
from tpserve.api.ends import Ends
from tpserve.api.flow import batches, take
from tpserve.distributed.gloo import leave, make_group
from tpserve.transports.claim import Claim, Visit, join_leader
from tpserve.transports.options import GlooOptions

if TYPE_CHECKING:
    import torch
    from torch.distributed import Work

__all__ = ["GlooTransport"]

LEADER = 0
OVERHEAD = 1024
LENGTH = 8
ATTEMPTS = 0.01
SLICE = 0.5
"""How late one that waits notices that another rank has gone than the one it waits for."""
NEVER = 30 * 24 * 3600.0
SETTLING = 0.2
"""Seconds in which the kernel, which ends a process's connections, takes its locks away too; and in which followers
pass on what a leader that has gone had sent."""


class GlooTransport(Transport):
    """Makes the ends of fan-outs whose ranks are all on one host."""

    def __init__(self, options: Options) -> None:
        import torch.distributed  # noqa: F401  it takes seconds, which no deadline should have to pay

        super().__init__(options)
        assert isinstance(options, GlooOptions)
        self._options = options
        self._ends = Ends()

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Make the leader's end."""
        return self._ends.add(lambda: _Sender(self._options, ipc_path(address), followers))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Make a follower's end."""
        check_follower(address, follower, followers)
        return self._ends.add(lambda: _Receiver(ipc_path(address), follower, followers))

    def close(self) -> None:
        """Close every end made here."""
        self._ends.close()


class _Broadcast:
    """One broadcast from the leader, under way since it was made.

    Args:
        group: the group.
        tensor: what is sent, or where it is put; gloo uses it until the end.
    """

    def __init__(self, group: Any, tensor: torch.Tensor) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = LEADER, 0
        self.tensor = tensor
        self._work: Work = group.broadcast([tensor], options)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._work.is_completed()

    def finish(self, deadline: float, late: str, look: Callable[[], None]) -> torch.Tensor:
        """Wait for its end, as often as you like, and look after each slice of that in vain.

        Raises:
            DeadlineExceeded: it is still under way.
            PeerLost: it has failed.
        """
        while True:
            try:
                return self._wait(min(deadline, time.monotonic() + SLICE), late)
            except DeadlineExceeded:
                look()
                if time.monotonic() >= deadline:
                    raise

    def _wait(self, deadline: float, late: str) -> torch.Tensor:
        try:
            self._work.wait(_remaining(deadline))
        except RuntimeError as error:
            if not self._work.is_completed():
                raise DeadlineExceeded(late) from error
            try:
                self._work.wait()  # it has ended a moment after the deadline, or failed
            except RuntimeError:
                raise PeerLost("a rank has gone") from error
        return self.tensor


class _Packet(NamedTuple):
    """What the leader has under way."""

    header: _Broadcast
    body: _Broadcast
    size: int


class _Sender(FanoutSender):
    def __init__(self, options: GlooOptions, path: Path, followers: int) -> None:
        self._options = options
        self._path = path
        self._followers = followers
        # Any: torch has no types for a group's methods.
        self._group: Any = None
        self._under_way: deque[_Packet] = deque()
        self._ahead = 0
        self._closed = False
        self._lock = RLock()
        self._claim = Claim(path)

    def connect(self, deadline: float) -> None:
        self._look()
        try:
            group = _join(self._claim.meeting, LEADER, self._followers + 1, deadline, self._look)
        except DeadlineExceeded as error:
            with self._lock:
                self._check_open()
                came = len(self._came())
            there = f"{came} of {self._followers} followers came to {self._path}"
            raise DeadlineExceeded(f"{there}, but {error}" if came == self._followers else there) from error
        with self._lock:
            self._group = group
            if self._closed:
                self._leave()
            self._check_open()

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        self._check_open()  # a close keeps the lock while it waits
        with self._lock:
            self._check_open()
            for batch in batches(frames, self._options.batch):
                body = struct.pack(f"<{len(batch)}Q", *map(len, batch)) + b"".join(batch)
                self._look()
                self._await_room(len(body) + OVERHEAD, deadline)
                self._post(len(batch), body)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._lock:  # a send that waits ends at its next look
            deadline = time.monotonic() + self._options.linger
            with suppress(TransportError):
                while self._under_way:
                    self._finish_oldest(deadline, self._check_followers)
            self._under_way.clear()
            self._leave()
            self._claim.close()

    def _came(self) -> list[int]:
        return [follower for follower in self._claim.came() if follower < self._followers]

    def _leave(self) -> None:
        group, self._group = self._group, None
        leave(group)

    def _look(self) -> None:
        """See that nothing has happened for which nobody should wait any more."""
        with self._lock:
            self._check_open()
            self._check_followers()

    def _await_room(self, size: int, deadline: float) -> None:
        while self._under_way and (self._under_way[0].body.is_done or self._ahead + size > self._options.send_buffer):
            self._finish_oldest(deadline, self._look)

    def _finish_oldest(self, deadline: float, look: Callable[[], None]) -> None:
        packet = self._under_way[0]
        late = f"a follower of {self._path} is {self._options.send_buffer} bytes behind"
        for broadcast in (packet.header, packet.body):
            self._finish(broadcast, deadline, late, look)
        self._ahead -= packet.size
        self._under_way.popleft()

    def _finish(self, broadcast: _Broadcast, deadline: float, late: str, look: Callable[[], None]) -> None:
        try:
            broadcast.finish(deadline, late, look)
        except PeerLost as error:
            _settle(look)
            raise PeerLost(f"a follower of {self._path} has gone") from error

    def _check_followers(self) -> None:
        for follower in self._came() if self._group is None else range(self._followers):
            if self._claim.has_lost(follower):
                raise PeerLost(f"follower {follower} of {self._path} has gone")

    def _post(self, count: int, body: bytes) -> None:
        import torch

        header = _Broadcast(self._group, torch.tensor((count, len(body)), dtype=torch.int64))
        content = _Broadcast(self._group, torch.frombuffer(bytearray(body), dtype=torch.uint8))
        size = len(body) + OVERHEAD
        self._under_way.append(_Packet(header, content, size))
        self._ahead += size

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the fan-out was closed")


class _Receiver(FanoutReceiver):
    def __init__(self, path: Path, follower: int, followers: int) -> None:
        self._path = path
        self._follower = follower
        self._followers = followers
        self._name = os.urandom(8).hex().encode()
        self._group: Any = None
        self._visit: Visit | None = None
        self._frames: deque[bytes] = deque()
        self._header: _Broadcast | None = None
        self._body: _Broadcast | None = None
        self._lost_since = math.inf
        self._closed = False
        self._lock = RLock()

    def connect(self, deadline: float) -> None:
        while (visit := self._come()) is None:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"no leader came to {self._path}")
            time.sleep(ATTEMPTS)
        group = _join(visit.meeting, 1 + self._follower, self._followers + 1, deadline, self._look)
        with self._lock:
            if self._closed:
                leave(group)
            self._check_open()
            self._group = group

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        self._check_open()
        while len(self._frames) < count:
            try:
                self._take(deadline, f"{len(self._frames)} of {count} frames came by {self._path}")
            except PeerLost as error:
                _settle(self._check_all)
                raise PeerLost(f"a rank at {self._path} has gone") from error
        return take(self._frames, count)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            group, self._group = self._group, None
            leave(group)
            self._header = self._body = None
            visit, self._visit = self._visit, None
            if visit is not None:
                visit.close()

    def _come(self) -> Visit | None:
        with self._lock:
            self._check_open()
            self._visit = join_leader(self._path, self._follower, self._name)
            return self._visit

    def _look(self) -> None:
        """See that this end is open and its leader there."""
        with self._lock:
            self._check_open()
            assert self._visit is not None, "connect() comes first"
            if self._visit.has_lost_leader():
                raise PeerLost(f"the leader at {self._path} has gone")

    def _look_again(self) -> None:
        """The same while something is awaited that others may still pass on, though the leader has just gone."""
        try:
            self._look()
        except PeerLost:
            self._lost_since = min(self._lost_since, time.monotonic())
            if time.monotonic() >= self._lost_since + SETTLING:
                raise

    def _check_all(self) -> None:
        """See that no rank has gone."""
        with self._lock:
            self._look()
            assert self._visit is not None, "connect() comes first"
            for follower in range(self._followers):
                if follower != self._follower and self._visit.has_lost(follower):
                    raise PeerLost(f"follower {follower} of {self._path} has gone")

    def _take(self, deadline: float, late: str) -> None:
        """Take one packet, or go on with it."""
        import torch

        with self._lock:
            self._check_open()
            if self._header is None:
                self._header = _Broadcast(self._group, torch.empty(2, dtype=torch.int64))
            header = self._header
        count, size = header.finish(deadline, late, self._look_again).tolist()
        with self._lock:
            self._check_open()
            if self._body is None:
                self._body = _Broadcast(self._group, torch.empty(size, dtype=torch.uint8))
            broadcast = self._body
        body = broadcast.finish(deadline, late, self._look_again).numpy().data
        self._header = self._body = None
        start = LENGTH * count
        for length in struct.unpack_from(f"<{count}Q", body):
            self._frames.append(bytes(body[start : start + length]))
            start += length

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the fan-out was closed")


def _join(path: Path, rank: int, size: int, deadline: float, look: Callable[[], None]) -> Any:
    return make_group(path, rank, size, NEVER, min(NEVER, max(0.001, deadline - time.monotonic())), look)


def _settle(look: Callable[[], None]) -> None:
    """Look for as long as it may take until it shows who has gone."""
    settled = time.monotonic() + SETTLING
    while time.monotonic() < settled:
        look()
        time.sleep(ATTEMPTS)


def _remaining(deadline: float) -> timedelta:
    """Gloo counts whole milliseconds, and takes 0 for "as long as usual"."""
    return timedelta(milliseconds=max(1, math.ceil(1000 * min(NEVER, deadline - time.monotonic()))))
