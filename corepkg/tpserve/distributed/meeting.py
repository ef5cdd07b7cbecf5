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

from tpserve.api import CommContext, DeadlineExceeded, FrameError, PeerLost, SyncContext, TransportError
from tpserve.api.doors import dial, greetings
from tpserve.distributed.quota import quota

__all__ = ["Meeting"]

Context = SyncContext | CommContext

LEADER = 0
RANK = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")
TOKEN = b"."
ATTEMPTS = 0.01
LONGEST_WAIT = 20 * 24 * 3600.0


class Meeting:
    """One rank's end. Call :meth:`lead` or :meth:`follow` first; after an error it can only be closed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._place = context.run_dir / context.name
        self._stray = ""
        self._peers: dict[int, socket.socket] = {}
        self._ranks: dict[int, int] = {}
        self._leaving = select.poll()

    def lead(self, descriptors: Sequence[int], deadline: float) -> None:
        """Wait until all followers have come, and hand each a copy of these descriptors.

        Raises:
            DeadlineExceeded: not all came.
            TransportError: somebody leads already, or two followers have the same rank.
        """
        followers = self._context.size - 1

        def late() -> str:
            return f"{len(self._peers)} of {followers} followers came to {self._place}{self._stray}"

        with _listener(self._context) as listener, closing(greetings(listener, RANK.size, deadline, late)) as guests:
            while len(self._peers) < followers:
                self._welcome(*next(guests))
        for rank, peer in self._peers.items():
            with _noticing(rank):
                socket.send_fds(peer, [TOKEN], descriptors)

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
        leader = _connect(self._context, deadline)
        self._add(LEADER, leader)
        with _noticing(LEADER):
            leader.sendall(RANK.pack(self._context.rank))
            within = _within(deadline, leader, "not all followers came to the meeting")
            token, handed_out, _, _ = socket.recv_fds(within, len(TOKEN), descriptors)
        if token != TOKEN:
            raise PeerLost("the leader has given up")
        return handed_out

    def barrier(self, deadline: float) -> None:
        """Wait until every rank has called this.

        Raises:
            DeadlineExceeded: not all came.
            PeerLost: a rank has gone.
        """
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
        while self._peers:
            _, peer = self._peers.popitem()
            self._leaving.unregister(peer)
            peer.close()

    def _welcome(self, peer: socket.socket, greeting: bytes) -> None:
        """Take a guest for a follower, or turn it away."""
        rank = int.from_bytes(greeting, "little") if len(greeting) == RANK.size else LEADER
        if LEADER < rank < self._context.size and rank not in self._peers:
            self._add(rank, peer)
            return
        peer.close()
        if rank in self._peers:
            raise FrameError(f"a second rank {rank} came to {self._place}")
        self._stray = f", and somebody who said {greeting!r}"

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
            for descriptor in _ready(readable, deadline, late):
                rank = self._ranks[descriptor]
                with _noticing(rank):
                    _receive(missing.pop(rank), len(TOKEN), deadline, f"rank {rank} did not come to the barrier")
                readable.unregister(descriptor)


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


def _connect(context: Context, deadline: float) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(context) as address:
            while not dial(peer, address):
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"no leader came to {context.run_dir / context.name}")
                time.sleep(ATTEMPTS)
    except BaseException:
        peer.close()
        raise
    return peer


@contextmanager
def _address(context: Context) -> Iterator[str]:
    """The socket's path by way of a descriptor, because a socket's path has at most 107 bytes."""
    directory = os.open(context.run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{context.name}"
    finally:
        os.close(directory)


def _receive(peer: socket.socket, size: int, deadline: float, late: str) -> bytes:
    data = b""
    while len(data) < size:
        part = _within(deadline, peer, late).recv(size - len(data))
        if not part:
            raise PeerLost(f"{late}, and one has gone")
        data += part
    return data


def _within(deadline: float, end: socket.socket, late: str) -> socket.socket:
    """Wait until there is something to read."""
    readable = select.poll()
    readable.register(end, select.POLLIN)
    _ready(readable, deadline, late)
    return end


def _ready(readable: select.poll, deadline: float, late: str) -> list[int]:
    """Wait for the first descriptors that can be read."""
    ready = readable.poll(1000 * min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT))
    if not ready:
        raise DeadlineExceeded(late)
    return [descriptor for descriptor, _ in ready]


@contextmanager
def _noticing(rank: int) -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise PeerLost(f"rank {rank} has gone") from error
