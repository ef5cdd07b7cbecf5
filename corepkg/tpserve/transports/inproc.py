"""Queues inside one process, with all the guarantees of a transport: for offline use and for tests.

Both ends of a link are made by the same :class:`InprocTransport` and meet by address; threads stand for processes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Lock

from tpserve.api import (
    Closed,
    DeadlineExceeded,
    FanoutReceiver,
    FanoutSender,
    Options,
    PeerLost,
    PipeReceiver,
    PipeSender,
    Transport,
    TransportError,
)
from tpserve.api.addresses import check_address, check_follower
from tpserve.api.ends import Ends

__all__ = ["InprocTransport"]

SIZE = 64 << 20
OVERHEAD = 64


class InprocTransport(Transport):
    """Makes ends that meet inside this object."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._lock = Lock()
        self._leading = Lock()
        self._queues: dict[str, _Queue] = {}
        self._ends = Ends()

    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Make the leader's end."""
        check_address(address)
        with self._leading:  # of two who look at once whether there is a leader, one becomes it
            queues = [self._queue(f"{address}.{index}") for index in range(followers)]
            return self._ends.add(lambda: _FanoutSender(queues))

    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Make a follower's end."""
        check_address(address)
        check_follower(address, follower, followers)
        return self._ends.add(lambda: _FanoutReceiver(self._queue(f"{address}.{follower}")))

    def pipe_receiver(self, address: str) -> PipeReceiver:
        """Make the receiving end."""
        return self._ends.add(lambda: _PipeReceiver(self._queue(check_address(address))))

    def pipe_sender(self, address: str) -> PipeSender:
        """Make a sending end."""
        return self._ends.add(lambda: _PipeSender(self._queue(check_address(address))))

    def close(self) -> None:
        """Close every end made here."""
        self._ends.close()

    def _queue(self, name: str) -> _Queue:
        with self._lock:
            queue = self._queues.get(name)
            if queue is None or queue.is_over:
                self._queues = {other: queue for other, queue in self._queues.items() if not queue.is_over}
                queue = self._queues[name] = _Queue(name)
            return queue


class _Queue:
    """Frames on their way to one reader, at most SIZE bytes of them, or one frame that is larger.

    Attributes:
        has_reader: the reading end is there.
        has_leader: the leader's end is there.
        is_known: the leader has heard of its follower.
        reader_left: the reading end was closed.
        writer_left: the leader's end was closed; the writers of a pipe come and go without that.
        siblings: the queues of the same leader, this one among them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_reader = False
        self.has_leader = False
        self.is_known = False
        self.reader_left = False
        self.writer_left = False
        self.siblings = [self]
        self._changed = Condition()
        self._frames: deque[bytes] = deque()
        self._bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether an end has gone: new ends of this name do not belong to it."""
        return self.reader_left or self.writer_left

    def change(self, **flags: bool | list[_Queue]) -> None:
        """Set attributes and wake whoever waits. What a reader that leaves has not taken, nobody will."""
        with self._changed:
            for name, value in flags.items():
                setattr(self, name, value)
            if self.reader_left:
                self._frames.clear()
            self._changed.notify_all()

    def claim_reader(self) -> bool:
        """Become the reading end, unless there is one."""
        with self._changed:
            if self.has_reader:
                return False
            self.has_reader = True
            self._changed.notify_all()
            return True

    def await_reader(self, late: str, deadline: float, is_closed: Callable[[], bool]) -> None:
        """Wait for the reading end."""
        with self._changed:
            self._wait(lambda: self.has_reader, late, deadline, is_closed)

    def await_writer(self, late: str, deadline: float, is_closed: Callable[[], bool]) -> None:
        """Wait until the leader knows of this queue's reader."""
        with self._changed:
            self._wait(lambda: self.is_known, late, deadline, is_closed)

    def put(self, frame: bytes, deadline: float, is_closed: Callable[[], bool]) -> None:
        """Add a frame when there is room."""
        cost = len(frame) + OVERHEAD
        with self._changed:
            self._wait(
                lambda: self._lost() or not self._frames or self._bytes + cost <= SIZE,
                f"the reader of {self.name} does not read",
                deadline,
                is_closed,
            )
            if lost := self._lost():
                raise PeerLost(f"the reader of {lost.name} has gone")
            self._frames.append(frame)
            self._bytes += cost
            self._changed.notify_all()

    def take(self, count: int, deadline: float, is_closed: Callable[[], bool]) -> list[bytes]:
        """Take exactly ``count`` frames, or none. While somebody waits for them, SIZE does not count."""
        frames: list[bytes] = []
        with self._changed:
            try:
                while len(frames) < count:
                    self._wait(
                        lambda: self._frames or self.writer_left,
                        f"{len(frames)} of {count} frames came by {self.name}",
                        deadline,
                        is_closed,
                    )
                    if not self._frames:
                        raise PeerLost(f"the leader of {self.name} has gone")
                    frames.append(self._pop())
            except TransportError:
                if not self.reader_left:
                    self._put_back(frames)
                raise
        return frames

    def take_some(self, max_frames: int, max_bytes: int, deadline: float, is_closed: Callable[[], bool]) -> list[bytes]:
        """Wait for a first frame, then take what is there."""
        frames: list[bytes] = []
        size = 0
        with self._changed:
            try:
                self._wait(lambda: bool(self._frames), "nothing came", deadline, is_closed)
            except DeadlineExceeded:
                return []
            while self._frames and len(frames) < max_frames and size < max_bytes:
                frames.append(self._pop())
                size += len(frames[-1])
        return frames

    def _wait(self, ready: Callable[[], object], late: str, deadline: float, is_closed: Callable[[], bool]) -> None:
        timeout = None if deadline == math.inf else deadline - time.monotonic()
        self._changed.wait_for(lambda: is_closed() or ready(), timeout)
        if is_closed():
            raise Closed(f"{self.name} was closed")
        if not ready():
            raise DeadlineExceeded(late)

    def _lost(self) -> _Queue | None:
        """The queue whose reader has gone, so that its siblings' readers will not get what it does not."""
        return next((queue for queue in self.siblings if queue.reader_left), None)

    def _pop(self) -> bytes:
        frame = self._frames.popleft()
        self._bytes -= len(frame) + OVERHEAD
        self._changed.notify_all()
        return frame

    def _put_back(self, frames: Sequence[bytes]) -> None:
        self._frames.extendleft(reversed(frames))
        self._bytes += sum(len(frame) + OVERHEAD for frame in frames)


class _FanoutSender(FanoutSender):
    def __init__(self, queues: list[_Queue]) -> None:
        for queue in queues:
            if queue.has_leader:
                raise TransportError(f"{queue.name} has a leader already")
        for queue in queues:
            queue.change(has_leader=True, siblings=queues)
        self._queues = queues
        self._closed = False

    def connect(self, deadline: float) -> None:
        for there, queue in enumerate(self._queues):
            queue.await_reader(f"{there} of {len(self._queues)} followers came", deadline, self._is_closed)
        for queue in self._queues:
            queue.change(is_known=True)

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        if self._closed:
            raise Closed("the fan-out was closed")
        for frame in frames:
            for queue in self._queues:
                queue.put(frame, deadline, self._is_closed)

    def close(self) -> None:
        self._closed = True
        for queue in self._queues:
            queue.change(writer_left=True)

    def _is_closed(self) -> bool:
        return self._closed


class _FanoutReceiver(FanoutReceiver):
    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        self._is_reader = False
        self._closed = False

    def connect(self, deadline: float) -> None:
        if self._closed:
            raise Closed("the fan-out was closed")
        self._is_reader = self._is_reader or self._queue.claim_reader()
        if not self._is_reader:
            raise TransportError(f"{self._queue.name} has a follower already")
        self._queue.await_writer(f"no leader answered at {self._queue.name}", deadline, self._is_closed)

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        if self._closed:
            raise Closed("the fan-out was closed")
        return self._queue.take(count, deadline, self._is_closed)

    def close(self) -> None:
        self._closed = True
        # One that was refused leaves the link to whom it belongs to, and still wakes a call of its own.
        self._queue.change(reader_left=self._is_reader or self._queue.reader_left)
        for queue in self._queue.siblings:  # the leader may wait for room in another
            queue.change()

    def _is_closed(self) -> bool:
        return self._closed


class _PipeReceiver(PipeReceiver):
    def __init__(self, queue: _Queue) -> None:
        if not queue.claim_reader():
            raise TransportError(f"{queue.name} has a receiver already")
        self._queue = queue
        self._closed = False

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        return self._queue.take_some(max_frames, max_bytes, deadline, self._is_closed)

    def close(self) -> None:
        self._closed = True
        self._queue.change(reader_left=True)

    def _is_closed(self) -> bool:
        return self._closed


class _PipeSender(PipeSender):
    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        self._closed = False

    def connect(self, deadline: float) -> None:
        self._queue.await_reader(f"no receiver came to {self._queue.name}", deadline, self._is_closed)

    def send(self, frame: bytes, deadline: float) -> None:
        self._queue.put(frame, deadline, self._is_closed)

    def close(self) -> None:
        self._closed = True
        self._queue.change()

    def _is_closed(self) -> bool:
        return self._closed
