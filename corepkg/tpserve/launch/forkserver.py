"""A process that has imported torch, and forks the children that need it: ``python -m tpserve.launch.forkserver``.

Importing torch takes a rank longer than all else before it loads weights. Here that is done once for all ranks of a
group, and for each generation: a server of which a rank was killed is back sooner. Nothing but the import is shared:
no thread runs and no device is touched before the fork.

A child is what it would be if it was started by itself (:mod:`tpserve.launch.child`), but for its parent. It dies with
the fork server, and the fork server goes when its starter does.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

import msgspec

from tpserve.parent import die_with_parent
from tpserve.stdio import secure_streams

__all__ = ["ForkServer", "Forked"]

LARGEST = 1 << 20
MOST_DESCRIPTORS = 64
SINGLE = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's library would start threads when it is loaded, and a fork leaves them behind."""


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Fork a child; its descriptors travel along.

    Attributes:
        number: what it is called from now on.
        environment: all its variables.
        descriptors: the numbers that its descriptors are to have.
    """

    number: int
    environment: dict[str, str]
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


_orders = msgspec.json.Decoder(Fork | Signal)
_reports = msgspec.json.Decoder(Imported | Ended)


class Forked:
    """A child of a fork server, as its starter sees it; like :class:`subprocess.Popen`, as far as is needed.

    Attributes:
        exit_code: None while it runs, or waits to be forked.
    """

    def __init__(self, server: ForkServer, number: int) -> None:
        self.exit_code: int | None = None
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
        outlives_thread = threading.current_thread() is not threading.main_thread()
        with other:
            arguments = [str(other.fileno()), str(os.getpid()), str(int(outlives_thread)), *modules]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tpserve.launch.forkserver", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # as children have it
                env={**environment, **SINGLE},
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
        self.order(Fork(number, dict(environment), list(descriptors)), list(descriptors.values()))
        return child

    def order(self, order: Fork | Signal, descriptors: Sequence[int] = ()) -> None:
        """Tell the server what to do; one that has gone has taken its children along."""
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self._socket, [msgspec.json.encode(order)], descriptors)

    def ended(self) -> list[Forked]:
        """Take what has arrived: children that have ended, with their exit codes; all if the server has gone."""
        text = b""
        with contextlib.suppress(ConnectionResetError):
            text = self._socket.recv(LARGEST)
        if not text:
            self.is_gone = True
            return [self._end(number, -signal.SIGKILL) for number in list(self._children)]
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


def main() -> None:
    """Serve the starter at the other end of a socket until it is gone; in a child, become that."""
    descriptor, parent, outlives_thread = map(int, sys.argv[1:4])
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    secure_streams()
    if not outlives_thread:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import(sys.argv[4:])
    if _Server(link).run():
        from tpserve.launch import child

        child.main()


def _import(modules: Sequence[str]) -> None:
    from setproctitle import setproctitle

    setproctitle("tpserve: forkserver")
    for name in modules:
        with contextlib.suppress(ImportError):  # a child that needs it says what is wrong
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collections in the children leave these pages shared


class _Server:
    """The server's side."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._pids: dict[int, int] = {}
        self._ends, self._end = socket.socketpair()
        self._ends.setblocking(False)
        self._end.setblocking(False)

    def run(self) -> bool:
        """Do what the starter says until it is gone; True in a child that was forked."""
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._end.fileno())
        self._report(Imported())
        while True:
            ready, _, _ = select.select([self._link, self._ends], [], [])
            if self._ends in ready:
                self._ends.recv(64)
                self._bury()
            if self._link in ready:
                order, descriptors = self._take()
                if order is None:
                    return False
                if isinstance(order, Signal):
                    self._signal(order)
                elif self._fork(order, descriptors):
                    return True

    def _take(self) -> tuple[Fork | Signal | None, list[int]]:
        """The next order; None if the starter is gone."""
        with contextlib.suppress(ConnectionResetError):
            text, descriptors, _, _ = socket.recv_fds(self._link, LARGEST, MOST_DESCRIPTORS)
            if text:
                return _orders.decode(text), descriptors
        return None, []

    def _fork(self, order: Fork, descriptors: list[int]) -> bool:
        pid = os.fork()
        if pid:
            self._pids[order.number] = pid
            for descriptor in descriptors:
                os.close(descriptor)
            return False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._link, self._ends, self._end):
            each.close()
        os.setsid()
        os.environ.clear()
        os.environ.update(order.environment)
        _place(descriptors, order.descriptors)
        return True

    def _signal(self, order: Signal) -> None:
        pid = self._pids.get(order.number)
        if pid is not None:
            os.kill(pid, order.signum)

    def _bury(self) -> None:
        """Report the children that have ended."""
        for number, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[number]
                self._report(Ended(number, os.waitstatus_to_exitcode(status)))

    def _report(self, report: Imported | Ended) -> None:
        with contextlib.suppress(BrokenPipeError):  # the starter has gone, which the next read tells
            self._link.send(msgspec.json.encode(report))


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers."""
    beyond = max(numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    main()
