"""Where the ranks of one host meet: a unix socket between the leader and each follower.

It serves start-up, barriers and the question whether somebody has gone; nothing of a round travels here. Whatever way a
process ends, the kernel closes its sockets.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from threading import Lock

from tpserve.api import Closed, CommContext, DeadlineExceeded, FrameError, PeerLost, SyncContext, TransportError
from tpserve.api.doors import dial, greetings
from tpserve.distributed.quota import quota

__all__ = ["Meeting", "greeting_of"]

Context = SyncContext | CommContext

LEADER = 0
MAGIC = b"tpserve meeting 1: "
GREETING = struct.Struct(f"<{len(MAGIC)}sI")
"""The first thing that a follower says, so that no stranger is taken for one who says nothing but a number."""

CREDENTIALS = struct.Struct("3i")
TOKEN = b"."
ATTEMPTS = 0.01
LOOK = 0.2
"""Seconds after which a wait looks whether this end was closed, or somebody else has gone."""


class Meeting:
    """One rank's end. Call :meth:`lead` or :meth:`follow` first; after an error it can only be closed.

    Another thread may close it at any time, which ends a call that waits with Closed.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._place = context.run_dir / context.name
        self._stray = ""
        self._peers: dict[int, socket.socket] = {}
        self._ranks: dict[int, int] = {}
        self._leaving = select.poll()
        self._lock = Lock()
        self._closed = False

    def lead(self, descriptors: Sequence[int], deadline: float) -> None:
        """Wait until all followers have come, and hand each a copy of these descriptors.

        Raises:
            DeadlineExceeded: not all came.
            PeerLost: one that came has gone.
            TransportError: somebody leads already, or two followers have the same rank.
        """
        followers = self._context.size - 1

        def late() -> str:
            return f"{len(self._peers)} of {followers} followers came to {self._place}{self._stray}"

        self._check_open()
        with (
            self._lock,
            _listener(self._context) as listener,
            closing(greetings(listener, GREETING.size, deadline, late, self._look)) as guests,
        ):
            while len(self._peers) < followers:
                self._welcome(*next(guests))
            self._hand_out(descriptors)

    def follow(self, descriptors: int, deadline: float) -> list[int]:
        """Come to the meeting and wait until all have.

        Args:
            descriptors: how many the leader hands out.
            deadline: when to give up.

        Returns:
            The descriptors; the caller closes them.

        Raises:
            DeadlineExceeded: there is no leader, or not all came.
            PeerLost: the leader has given up.
        """
        self._check_open()
        with self._lock, _noticing(LEADER):
            leader = self._connect(deadline)
            self._add(LEADER, leader)
            leader.sendall(greeting_of(self._context.rank))
            self._await_one(leader, deadline, "not all followers came to the meeting")
            token, handed_out, _, _ = socket.recv_fds(leader, len(TOKEN), descriptors)
        if token != TOKEN:
            if time.monotonic() >= deadline:  # which may have been the leader's, too
                raise DeadlineExceeded("not all followers came to the meeting")
            raise PeerLost("the leader has given up")
        return handed_out

    def barrier(self, deadline: float) -> None:
        """Wait until every rank has called this.

        Raises:
            DeadlineExceeded: not all came.
            PeerLost: a rank has gone.
        """
        self._check_open()
        with self._lock:
            if self._context.rank == LEADER:
                self._await_tokens(deadline)
                self._send_tokens()
            else:
                self._send_tokens()
                self._await_tokens(deadline)

    def lost(self) -> int | None:
        """A rank that has gone, if any; the leader sees followers, and a follower the leader. Takes a system call."""
        for descriptor, _ in self._leaving.poll(0):
            return self._ranks[descriptor]
        return None

    def cores(self) -> int:
        """How many cores this rank and those it has met may use together; followers have met the leader.

        No more than the container's share, where it has one.
        """
        cores = os.sched_getaffinity(0)
        for peer in self._peers.values():
            pid, _, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
            with suppress(OSError):  # it has left, or cannot be seen from here
                cores |= os.sched_getaffinity(pid)
        return int(min(len(cores), quota()))

    def close(self) -> None:
        """Leave, which the others notice. May be called twice."""
        self._closed = True
        with self._lock:
            while self._peers:
                _, peer = self._peers.popitem()
                self._leaving.unregister(peer)
                peer.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the meeting was closed")

    def _look(self) -> None:
        """See that nothing has happened for which the leader should wait no more."""
        self._check_open()
        rank = self.lost()
        if rank is not None:
            raise PeerLost(f"rank {rank} has gone")

    def _welcome(self, peer: socket.socket, greeting: bytes) -> None:
        """Take a guest for a follower, or turn it away."""
        followers = range(LEADER + 1, self._context.size)
        rank = next((rank for rank in followers if greeting == greeting_of(rank)), None)
        if rank is not None and rank not in self._peers:
            self._add(rank, peer)
            return
        peer.close()
        if rank is not None:
            raise FrameError(f"a second rank {rank} came to {self._place}")
        self._stray = f", and somebody who said {greeting!r}"

    def _hand_out(self, descriptors: Sequence[int]) -> None:
        for rank, peer in self._peers.items():
            with _noticing(rank):
                socket.send_fds(peer, [TOKEN], descriptors)

    def _add(self, rank: int, peer: socket.socket) -> None:
        self._peers[rank] = peer
        self._ranks[peer.fileno()] = rank
        self._leaving.register(peer, select.POLLRDHUP)

    def _send_tokens(self) -> None:
        for rank, peer in self._peers.items():
            with _noticing(rank):
                peer.sendall(TOKEN)

    def _await_tokens(self, deadline: float) -> None:
        readable = select.poll()
        for peer in self._peers.values():
            readable.register(peer, select.POLLIN)
        missing = dict(self._peers)
        while missing:
            late = f"rank {min(missing)} did not come to the barrier"
            for descriptor in self._ready(readable, deadline, late):
                rank = self._ranks[descriptor]
                with _noticing(rank):
                    if not missing.pop(rank).recv(len(TOKEN)):
                        raise PeerLost(f"rank {rank} has gone")
                readable.unregister(descriptor)

    def _await_one(self, peer: socket.socket, deadline: float, late: str) -> None:
        readable = select.poll()
        readable.register(peer, select.POLLIN)
        self._ready(readable, deadline, late)

    def _ready(self, readable: select.poll, deadline: float, late: str) -> list[int]:
        """Wait for the first descriptors that can be read."""
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            ready = readable.poll(1000 * min(remaining, LOOK))
            if ready:
                return [descriptor for descriptor, _ in ready]
            self._check_open()
            if self._context.rank == LEADER:  # which waits for several; an end of the only one is there to be read
                self._look()
            if not remaining:
                raise DeadlineExceeded(late)

    def _connect(self, deadline: float) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self._context) as address:
                while not dial(peer, address):
                    self._check_open()
                    if time.monotonic() >= deadline:
                        raise DeadlineExceeded(f"no leader came to {self._place}")
                    time.sleep(ATTEMPTS)
        except BaseException:
            peer.close()
            raise
        return peer


def greeting_of(rank: int) -> bytes:
    """What a follower says who comes."""
    return GREETING.pack(MAGIC, rank)


@contextmanager
def _listener(context: Context) -> Iterator[socket.socket]:
    """A listening socket whose file is gone in the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, _address(context) as address:
        try:
            listener.bind(address)
        except OSError as error:
            raise TransportError(f"cannot meet at {context.run_dir / context.name}: {error.strerror}") from error
        try:
            listener.listen(context.size)
            yield listener
        finally:
            (context.run_dir / context.name).unlink(missing_ok=True)


@contextmanager
def _address(context: Context) -> Iterator[str]:
    """The socket's path by way of a descriptor, because a socket's path has at most 107 bytes."""
    directory = os.open(context.run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{context.name}"
    finally:
        os.close(directory)


@contextmanager
def _noticing(rank: int) -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise PeerLost(f"rank {rank} has gone") from error
