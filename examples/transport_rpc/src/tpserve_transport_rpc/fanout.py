"""The fan-out: the leader calls every follower with the frames, as the first tensor-parallel servers did.

Followers dial the leader, which then calls them back by the same connection. A thread at the follower answers; its
reply says that the frames wait there to be read, and comes when there is room for them. So a leader can be ahead by
what may wait there and by the few calls that may be under way. There are few enough replies that a leader which is
busy writing need not take them: the kernel has room for all.

Arguments are RPyC's immutable values, and nothing is ever unpickled.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any

import rpyc

from tpserve.api import (
    Closed,
    DeadlineExceeded,
    FanoutReceiver,
    FanoutSender,
    FrameError,
    PeerLost,
    TransportError,
)
from tpserve.api.flow import batches
from tpserve_transport_rpc.inbox import Inbox
from tpserve_transport_rpc.plugin import RpcOptions
from tpserve_transport_rpc.stream import Stream, connected, listening, path_of

__all__ = ["RpcFanoutReceiver", "RpcFanoutSender"]

ATTEMPTS = 0.01
SLICE = 1.0
"""Seconds that RPyC, which looks at the wall clock, is left to wait by itself."""
GREETING_TIME = 5.0
CONFIG = {
    "allow_pickle": False,
    "allow_safe_attrs": False,
    "include_local_traceback": False,
    "include_local_version": False,
    "log_exceptions": False,
    "sync_request_timeout": GREETING_TIME,
}


class Connection:
    """One connection.

    Args:
        stream: its socket.
        service: what the other side may call.
        compress: have RPyC compress what is large.
    """

    def __init__(self, stream: Stream, service: rpyc.Service, compress: bool) -> None:
        self.stream = stream
        self._connection: Any = rpyc.connect_channel(rpyc.Channel(stream, compress), service, CONFIG)

    @property
    def root(self) -> Any:
        """What can be called at the other side."""
        return self._connection.root

    def serve(self, deadline: float, late: str) -> None:
        """Wait for a reply, for a while.

        Raises:
            DeadlineExceeded: none came.
            EOFError: the other side has gone.
        """
        remaining = deadline - time.monotonic()
        if not self._connection.serve(min(max(0.0, remaining), SLICE)) and remaining <= 0:
            raise DeadlineExceeded(late)

    def answer(self) -> None:
        """Answer calls until the connection ends, whatever ends it."""
        self.stream.deadline = math.inf
        with suppress(EOFError, OSError):
            while True:
                self._connection.serve(None)

    def close(self) -> None:
        """Close the socket first: RPyC's own close waits for an answer."""
        self.stream.close()
        self._connection.close()


class Peer:
    """A follower, as the leader sees it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._take = rpyc.async_(connection.root.take)
        self._calls: deque[Any] = deque()

    def call(self, frames: Sequence[bytes], deadline: float) -> None:
        """Begin a call."""
        self.connection.stream.deadline = deadline
        self._calls.append(self._take(tuple(frames)))

    def settle(self, most: int, deadline: float, late: str) -> None:
        """Take replies until no more than so many calls are under way; those that are there in any case."""
        with suppress(DeadlineExceeded):
            while True:
                self.connection.serve(0.0, late)
                self._drop_answered()
        while len(self._calls) > most:
            self.connection.serve(deadline, late)
            self._drop_answered()

    def _drop_answered(self) -> None:
        while self._calls and self._calls[0].ready:
            answer = self._calls.popleft()
            if answer.error:
                raise FrameError("a follower did not accept frames")


class RpcFanoutSender(FanoutSender):
    """The leader's end."""

    def __init__(self, options: RpcOptions, address: str, followers: int) -> None:
        self._options = options
        self._address = address
        self._count = followers
        self._peers: dict[int, Peer] = {}
        self._connections: list[Connection] = []
        self._torn = False
        self._closed = False
        self._lock = Lock()
        self._door = listening(address, followers)

    def connect(self, deadline: float) -> None:
        """Wait for each follower and ask which it is; then tell all."""
        with self._lock, _translated(self._address, self._check_open):
            while len(self._peers) < self._count:
                self._admit(deadline)
            for peer in self._peers.values():
                peer.connection.root.welcome()
            self._leave_door()

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Call every follower; no follower waits for another's reply."""
        with self._lock, _translated(self._address, self._check_open):
            self._check_open()
            for follower, peer in self._peers.items():
                peer.settle(self._options.calls, deadline, f"follower {follower} of {self._address} is silent")
            if self._torn:
                raise TransportError("frames were sent to some followers: the fan-out can only be closed")
            self._torn = True
            for batch in batches(frames, self._options.batch):
                self._call_all(batch, deadline)
            self._torn = False

    def close(self) -> None:
        """Wait until followers have taken what was sent, and close the connections."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + self._options.linger
        if not self._lock.acquire(timeout=self._options.linger):
            for connection in self._connections:
                connection.stream.interrupt()
            self._lock.acquire()
        try:
            with suppress(TransportError), _translated(self._address, self._check_open):
                for peer in [] if self._torn else self._peers.values():
                    peer.settle(0, deadline, "what was sent was not taken")
            for connection in self._connections:
                connection.close()
            self._leave_door()
        finally:
            self._lock.release()

    def _admit(self, deadline: float) -> None:
        late = f"{len(self._peers)} of {self._count} followers came to {self._address}"
        self._check_open()
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded(late)
        self._door.settimeout(min(remaining, SLICE))
        try:
            stream = Stream(self._door.accept()[0])
        except TimeoutError:
            return
        stream.deadline = deadline
        connection = Connection(stream, rpyc.VoidService(), self._options.compress)
        self._connections.append(connection)
        follower = connection.root.follower()
        if follower not in range(self._count) or follower in self._peers:
            raise FrameError(f"expected {self._count} followers at {self._address}, each once, found {follower!r}")
        self._peers[follower] = Peer(connection)

    def _call_all(self, batch: Sequence[bytes], deadline: float) -> None:
        for follower, peer in self._peers.items():
            late = f"follower {follower} of {self._address} is {self._options.calls} calls behind"
            peer.settle(self._options.calls - 1, deadline, late)
            peer.call(batch, deadline)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the fan-out was closed")

    def _leave_door(self) -> None:
        path = path_of(self._address)
        if self._door.fileno() >= 0 and path is not None:
            path.unlink(missing_ok=True)
        self._door.close()


class RpcFanoutReceiver(FanoutReceiver):
    """A follower's end."""

    def __init__(self, options: RpcOptions, address: str, follower: int) -> None:
        self._options = options
        self._address = address
        self._inbox = Inbox(follower, options.send_buffer)
        self._frames: list[bytes] = []
        self._connection: Connection | None = None
        self._thread = Thread(target=self._answer, name=f"tpserve-rpc-{follower}", daemon=True)
        self._closed = False

    def connect(self, deadline: float) -> None:
        """Dial the leader, and answer it from now on."""
        while (end := connected(self._address)) is None:
            if self._closed:
                raise Closed("the fan-out was closed")
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"no leader came to {self._address}")
            time.sleep(ATTEMPTS)
        self._connection = Connection(Stream(end), self._inbox, self._options.compress)
        self._thread.start()
        self._inbox.await_welcome(deadline, f"not all followers came to {self._address}")

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        """Take frames that wait, until there are enough."""
        if self._closed:
            raise Closed("the fan-out was closed")
        self._inbox.move(self._frames, count, deadline)
        taken, self._frames = self._frames[:count], self._frames[count:]
        return taken

    def close(self) -> None:
        """Wake whoever waits in another thread, and close the connection."""
        if self._closed:
            return
        self._closed = True
        self._inbox.close()
        if self._connection is not None:
            self._connection.stream.interrupt()
            self._thread.join()
            self._connection.close()

    def _answer(self) -> None:
        assert self._connection is not None, "connect() starts the thread"
        self._connection.answer()
        self._inbox.end()


@contextmanager
def _translated(address: str, check_open: Callable[[], None]) -> Iterator[None]:
    """RPyC raises EOFError when a connection ends, and TimeoutError when a greeting has no answer."""
    try:
        yield
    except TransportError:
        raise
    except (EOFError, TimeoutError) as error:
        check_open()
        raise PeerLost(f"a peer at {address} has gone") from error
