"""Announcements over gloo: one small send to each follower.

A broadcast would do as well and take 3.6 times as long (188 against 52 µs, two ranks): it goes through a worker
thread, and a worker that waits for a peer cannot be stopped. A send is posted and done with; gloo delivers it when the
follower asks for it. A few are under way at most, so the leader waits for nothing but a follower that does not read.

Gloo waits for one rank at a time, and has no way to look at the others meanwhile: that a rank has gone is seen at once
by who waits for it, and at the deadline by who waits for another. So it is while ranks join, for any of them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from tpserve.api import Announcement, Closed, DeadlineExceeded, Options, PeerLost, Sync, SyncContext
from tpserve.distributed.gloo import leave, make_group

if TYPE_CHECKING:
    import torch
    from torch.distributed import Work

__all__ = ["GlooSync"]

LEADER = 0
ANNOUNCEMENT, BARRIER = 1, 2
UNDER_WAY = 16
LINGER = 5.0
LONGEST_WAIT = 30 * 24 * 3600.0


class _Posted(NamedTuple):
    """A send under way to one rank; gloo reads the tensor until it is done."""

    rank: int
    tensor: torch.Tensor
    work: Work


class GlooSync(Sync):
    """One rank's end; all ranks on one host. After an error it can only be closed.

    Another thread may close it at any time, which ends a call that waits with Closed; not before gloo has connected, or
    given up, if it is at that.
    """

    def __init__(self, options: Options, context: SyncContext) -> None:
        import torch.distributed  # noqa: F401  it takes seconds, which no deadline should have to pay

        super().__init__(options, context)
        # Any: torch has no types for a group's methods.
        self._group: Any = None
        self._posted: deque[_Posted] = deque()
        self._lock = Lock()
        self._closed = False

    def connect(self, deadline: float) -> None:
        """Join the others, in a directory in the run directory."""
        context = self.context
        place = context.run_dir / context.name
        group = make_group(place, context.rank, context.size, _remaining(deadline), look=self._check_open)
        with self._lock:
            if self._closed:
                leave(group)
            self._check_open()
            self._group = group

    def announce(self, announcement: Announcement, deadline: float) -> None:
        """Send to each follower, and wait for the oldest sends if too many are under way."""
        import torch

        fields = (
            announcement.round,
            announcement.first_frame,
            announcement.count,
            announcement.digest_round,
            announcement.digest,
        )
        tensor = torch.tensor(fields, dtype=torch.int64)
        for rank in range(1, self.context.size):
            self._post(rank, tensor, ANNOUNCEMENT)
        while (posted := self._too_many()) is not None:
            with self._translated(posted.rank, deadline):
                posted.work.wait(timedelta(seconds=_remaining(deadline)))

    def receive(self, deadline: float) -> Announcement:
        """Ask the leader for the next announcement."""
        return Announcement(*self._ask(LEADER, 5, ANNOUNCEMENT, deadline))

    def barrier(self, deadline: float) -> None:
        """Every follower tells the leader, and the leader tells every follower."""
        import torch

        token = torch.zeros(1, dtype=torch.int64)
        followers = range(1, self.context.size)
        if self.context.rank != LEADER:
            self._post(LEADER, token, BARRIER)
            self._ask(LEADER, 1, BARRIER, deadline)
            return
        for rank in followers:
            self._ask(rank, 1, BARRIER, deadline)
        for rank in followers:
            self._post(rank, token, BARRIER)

    def close(self) -> None:
        """Wait a little until the followers have what was announced, and leave the group."""
        self._closed = True
        deadline = time.monotonic() + LINGER
        with self._lock:
            posted_all, self._posted = self._posted, deque()
        with suppress(RuntimeError):
            for posted in posted_all if self.context.rank == LEADER else []:  # nobody must still hear of a follower
                posted.work.wait(timedelta(seconds=_remaining(deadline)))
        with self._lock:
            group, self._group = self._group, None
            leave(group)

    def _post(self, rank: int, tensor: torch.Tensor, tag: int) -> None:
        with self._translated(rank, math.inf):
            self._posted.append(_Posted(rank, tensor, self._open_group().send([tensor], rank, tag)))

    def _too_many(self) -> _Posted | None:
        """The oldest send, if too many are under way; gloo tells only once that one is done."""
        with self._lock:
            return self._posted.popleft() if len(self._posted) > UNDER_WAY * (self.context.size - 1) else None

    def _ask(self, rank: int, size: int, tag: int, deadline: float) -> list[int]:
        import torch

        tensor = torch.empty(size, dtype=torch.int64)
        with self._translated(rank, deadline):
            self._open_group().recv([tensor], rank, tag).wait(timedelta(seconds=_remaining(deadline)))
        values: list[int] = tensor.tolist()
        return values

    def _open_group(self) -> Any:
        group = self._group
        self._check_open()
        assert group is not None, "connect() comes first"
        return group

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the synchronisation was closed")

    @contextmanager
    def _translated(self, rank: int, deadline: float) -> Iterator[None]:
        """Gloo raises RuntimeError for everything: it is the deadline if that has passed, and else a lost peer."""
        try:
            yield
        except RuntimeError as error:
            self._check_open()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"rank {rank} is silent") from error
            raise PeerLost(f"rank {rank} has gone") from error


def _remaining(deadline: float) -> float:
    """Seconds to wait so that the deadline has surely passed when gloo, which cuts off to milliseconds, gives up.

    Never 0, which gloo takes for "as long as usual", and never longer than it can count.
    """
    wait = min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT)
    return (math.ceil(1000 * wait) + 1) / 1000
