"""A process that has imported torch, and forks the children that need it (:mod:`tpserve.launch.forking`).

Importing torch takes a rank longer than all else before it loads weights. Here that is done once for all ranks of a
group, and for each generation: a server of which a rank was killed is back sooner. Nothing but the import is shared:
no thread runs and no device is touched before the fork.

A child is what it would be if it was started by itself (:mod:`tpserve.launch.child`), but for its parent. It dies with
the fork server, and the fork server goes when its starter does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

import msgspec

__all__ = ["LARGEST", "Ended", "Fork", "ForkServer", "Forked", "Imported", "Order", "Report", "Signal"]

LARGEST = 1 << 20
"""Bytes of an order or a report."""

SINGLE = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's library would start threads when it is loaded, and a fork leaves them behind."""


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Fork a child; its descriptors travel along.

    Attributes:
        number: what it is called from now on.
        changed: variables that the server does not have so.
        removed: variables that it has, and the child does not.
        descriptors: the numbers that its descriptors are to have.
    """

    number: int
    changed: list[tuple[bytes, bytes]]
    removed: list[bytes]
    descriptors: list[int]


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """Send a child a signal; nothing happens if it has ended."""

    number: int
    signum: int


class Imported(msgspec.Struct, frozen=True, tag="imported"):
    """From now on children are forked at once."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A child has ended; ``exit_code`` is a negative signal number if a signal ended it."""

    number: int
    exit_code: int


Order = Fork | Signal
Report = Imported | Ended

_reports = msgspec.msgpack.Decoder(Report)


class Forked:
    """A child of a fork server, as its starter sees it; like :class:`subprocess.Popen`, as far as is needed.

    Attributes:
        exit_code: None while it runs, or waits to be forked.
        server_exit_code: how its server ended, if that ended it.
        is_unreported: it had hung up before that, and its server has not said how it ended.
    """

    def __init__(self, server: ForkServer, number: int) -> None:
        self.exit_code: int | None = None
        self.server_exit_code: int | None = None
        self.is_unreported = False
        self._server = server
        self._number = number

    def send_signal(self, signum: int) -> None:
        """Send a signal; nothing happens if it has ended. One that is still to be forked ends, with its server."""
        if self.exit_code is not None:
            return
        if self._server.forks_at_once:
            self._server.order(Signal(self._number, signum))
        else:
            self._server.kill()

    def wait(self) -> int:
        """The exit code of one that has ended."""
        assert self.exit_code is not None
        return self.exit_code


class ForkServer:
    """The starter's side. Nothing here waits for the server, which imports for a while before it forks.

    Args:
        environment: all variables of the server.
        modules: what it imports before it forks.

    Attributes:
        pid: its process id.
        forks_at_once: it has imported what it imports.
        is_gone: it has ended, as :meth:`ended` has found.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self.forks_at_once = False
        self.is_gone = False
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._children: dict[int, Forked] = {}
        self._numbers = itertools.count()
        self._environment = {**environment, **SINGLE}
        outlives_thread = threading.current_thread() is not threading.main_thread()
        with other:
            arguments = [str(other.fileno()), str(os.getpid()), str(int(outlives_thread)), *modules]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tpserve.launch.forking", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # as children have it
                env=self._environment,
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
        self.pid = self._process.pid

    def fileno(self) -> int:
        """Readable when :meth:`ended` has something to take."""
        return self._socket.fileno()

    def fork(self, environment: Mapping[str, str], descriptors: Mapping[int, int]) -> Forked:
        """Have a child forked.

        Args:
            environment: all its variables.
            descriptors: for each number that it is to have, one of ours.
        """
        number = next(self._numbers)
        child = self._children[number] = Forked(self, number)
        ours = self._environment
        # Bytes, as the kernel has them; and only what differs, for a datagram has not room for all.
        changed = [
            (os.fsencode(name), os.fsencode(text)) for name, text in environment.items() if ours.get(name) != text
        ]
        removed = [os.fsencode(name) for name in ours if name not in environment]
        self.order(Fork(number, changed, removed, list(descriptors)), list(descriptors.values()))
        return child

    def order(self, order: Order, descriptors: Sequence[int] = ()) -> None:
        """Tell the server what to do; one that has gone has taken its children along."""
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._socket, [msgspec.msgpack.encode(order)], descriptors)

    def ended(self) -> list[Forked]:
        """Take what has arrived: children that have ended, with their exit codes; all if the server has gone."""
        text = b""
        with contextlib.suppress(ConnectionResetError):
            text = self._socket.recv(LARGEST)
        if not text:
            self.is_gone = True
            exit_code = self._process.wait()
            lost = [self._end(number, -signal.SIGKILL) for number in list(self._children)]
            for child in lost:
                child.server_exit_code = exit_code
            return lost
        report = _reports.decode(text)
        if isinstance(report, Ended):
            return [self._end(report.number, report.exit_code)]
        self.forks_at_once = True
        return []

    def kill(self) -> None:
        """Kill it, and all children with it; :meth:`ended` tells when."""
        self._process.kill()

    def close(self) -> None:
        """Kill it if it has not ended, and close the socket."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _end(self, number: int, exit_code: int) -> Forked:
        child = self._children.pop(number)
        child.exit_code = exit_code
        return child
