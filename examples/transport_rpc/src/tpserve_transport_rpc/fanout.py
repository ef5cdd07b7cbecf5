"""The fan-out: the leader calls every follower with the frames, as the first tensor-parallel servers did.

Followers dial the leader, which then calls them back by the same connection. A thread at the follower answers; its
reply says that the frames wait there to be read, and comes when there is room for them. So a leader can be ahead by
what may wait there and by the few calls that may be under way. There are few enough replies that a leader which is
busy writing need not take them: the kernel has room for all.

Arguments are RPyC's immutable values, and nothing is ever unpickled.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
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
from tpserve.api.doors import greetings
from tpserve.api.flow import batches
from tpserve_transport_rpc.inbox import Inbox
from tpserve_transport_rpc.plugin import RpcOptions
from tpserve_transport_rpc.stream import SLICE, Stream, connected, listening, path_of

__all__ = ["RpcFanoutReceiver", "RpcFanoutSender"]

GREETING = struct.Struct("<4sI")
MAGIC = b"tpr1"
ATTEMPTS = 0.01
CONFIG = {
    "allow_pickle": False,
    "allow_safe_attrs": False,
    "include_local_traceback": False,
    "include_local_version": False,
    "log_exceptions": False,
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

    def root(self, deadline: float) -> Any:
        """What can be called at the other side; RPyC's own waits for answers end at the deadline from now on."""
        # RPyC reads this for each call, but lets nobody set it for one.
        self._connection._config["sync_request_timeout"] = max(0.001, deadline - time.monotonic())
        self.stream.deadline = deadline
        return self._connection.root

    def serve(self, deadline: float, late: str) -> None:
        """Wait for a reply, for a while.

        Raises:
            DeadlineExceeded: none came.
            Closed: the connection is to be closed.
            EOFError: the other side has gone.
        """
        remaining = deadline - time.monotonic()
        if not self._connection.serve(min(max(0.0, remaining), SLICE)):
            self.stream.check_waiting(remaining, late)

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

    def __init__(self, connection: Connection, deadline: float) -> None:
        self.connection = connection
        self._take = rpyc.async_(connection.root(deadline).take)
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
        self._stray = ""
        self._torn = False
        self._joined = False
        self._closed = False
        self._lock = Lock()
        self._door = listening(address, followers)
        self._file = path_of(address)

    def connect(self, deadline: float) -> None:
        """Wait for each follower and ask which it is; then tell all."""
        with self._lock, _translated(self._address, self._check_ends):
            with closing(greetings(self._door, GREETING.size, deadline, self._late, self._check_ends)) as guests:
                while len(self._peers) < self._count:
                    self._admit(*next(guests), deadline)
            for follower, peer in self._peers.items():
                with _answering(f"follower {follower} of {self._address} does not answer"):
                    peer.connection.root(deadline).welcome()
            self._joined = True
            self._leave_door()

    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Call every follower; no follower waits for another's reply."""
        with self._lock, _translated(self._address, self._check_ends):
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
        self._remove_file()
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        for connection in self._connections:
            connection.stream.is_closing = True
            if not self._joined:
                connection.stream.interrupt()
        self._lock.acquire()
        try:
            for connection in self._connections:
                connection.stream.is_closing = False
                connection.stream.look = lambda: None  # who is there gets what was sent
            with suppress(TransportError), _translated(self._address, self._check_open):
                for peer in [] if self._torn else self._peers.values():
                    peer.settle(0, deadline, "what was sent was not taken")
            for connection in self._connections:
                connection.close()
            self._leave_door()
        finally:
            self._lock.release()

    def _late(self) -> str:
        return f"{len(self._peers)} of {self._count} followers came to {self._address}{self._stray}"

    def _admit(self, guest: socket.socket, greeting: bytes, deadline: float) -> None:
        numbers = range(self._count)
        follower = next((number for number in numbers if greeting == GREETING.pack(MAGIC, number)), None)
        if follower is None:
            guest.close()
            self._stray = f", and somebody who said {greeting!r}"
            return
        if follower in self._peers:
            guest.close()
            raise FrameError(f"a second follower {follower} came to {self._address}")
        stream = Stream(guest, f"follower {follower} of {self._address}")
        connection = Connection(stream, rpyc.VoidService(), self._options.compress)
        connection.stream.look = self._check_followers
        self._connections.append(connection)
        with _answering(f"follower {follower} of {self._address} does not answer"):
            self._peers[follower] = Peer(connection, deadline)

    def _call_all(self, batch: Sequence[bytes], deadline: float) -> None:
        for follower, peer in self._peers.items():
            late = f"follower {follower} of {self._address} is {self._options.calls} calls behind"
            peer.settle(self._options.calls - 1, deadline, late)
            peer.call(batch, deadline)

    def _check_ends(self) -> None:
        self._check_open()
        self._check_followers()

    def _check_followers(self) -> None:
        """See that no follower has gone while another is waited for."""
        for follower, peer in self._peers.items():
            if peer.connection.stream.has_ended():
                raise PeerLost(f"follower {follower} of {self._address} has gone")

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the fan-out was closed")

    def _leave_door(self) -> None:
        self._remove_file()
        self._door.close()

    def _remove_file(self) -> None:
        """While the door is open: afterwards it may be somebody else's."""
        file, self._file = self._file, None
        if file is not None:
            file.unlink(missing_ok=True)


class RpcFanoutReceiver(FanoutReceiver):
    """A follower's end."""

    def __init__(self, options: RpcOptions, address: str, follower: int) -> None:
        self._options = options
        self._address = address
        self._greeting = GREETING.pack(MAGIC, follower)
        self._inbox = Inbox(options.send_buffer)
        self._frames: list[bytes] = []
        self._connection: Connection | None = None
        self._thread = Thread(target=self._answer, name=f"tpserve-rpc-{follower}", daemon=True)
        self._closed = False

    def connect(self, deadline: float) -> None:
        """Dial the leader, and answer it from now on."""
        self._check_open()
        while (end := connected(self._address, deadline)) is None:
            self._check_open()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"no leader came to {self._address}")
            time.sleep(ATTEMPTS)
        stream = Stream(end, f"the leader at {self._address}")
        stream.deadline = deadline
        with _translated(self._address, self._check_open):
            stream.write(self._greeting)
        self._connection = Connection(stream, self._inbox, self._options.compress)
        self._thread.start()
        self._inbox.await_welcome(deadline, f"not all followers came to {self._address}")

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        """Take frames that wait, until there are enough."""
        self._check_open()
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

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the fan-out was closed")

    def _answer(self) -> None:
        assert self._connection is not None, "connect() starts the thread"
        self._connection.answer()
        self._inbox.end()


@contextmanager
def _answering(late: str) -> Iterator[None]:
    """RPyC raises TimeoutError when a call has no answer."""
    try:
        yield
    except TransportError:
        raise
    except TimeoutError as error:
        raise DeadlineExceeded(late) from error


@contextmanager
def _translated(address: str, check_open: Callable[[], None]) -> Iterator[None]:
    """RPyC raises EOFError when a connection ends; a door that was shut is an OSError."""
    try:
        yield
    except TransportError:
        raise
    except (EOFError, OSError) as error:
        check_open()
        raise PeerLost(f"a peer at {address} has gone") from error
