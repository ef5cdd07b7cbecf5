"""The fork server itself, and how a child comes out of it: ``python -m tpserve.launch.forking``.

Its arguments are the descriptor of a socket, the process id of its starter, whether the thread that started it may end
before it, and what it is to import.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec

from tpserve.launch.forkserver import LARGEST, Ended, Fork, Imported, Order, Report, Signal
from tpserve.parent import die_with_parent
from tpserve.stdio import secure_streams

__all__: list[str] = []

MOST_DESCRIPTORS = 64

IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Whoever sends these to all processes of a server means its supervisor, which ends the others."""

_orders = msgspec.msgpack.Decoder(Order)


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
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    _import(sys.argv[4:])
    server = _Server(link)
    if server.run():
        from tpserve.launch import child

        child.main()


def _import(modules: Sequence[str]) -> None:
    from setproctitle import setproctitle

    setproctitle("tpserve: forkserver")
    for name in modules:
        with contextlib.suppress(Exception):  # whatever is wrong with it, a child that needs it says so
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
                    signal.set_wakeup_fd(-1)
                    return False
                if isinstance(order, Signal):
                    self._signal(order)
                elif self._fork(order, descriptors):
                    return True

    def _take(self) -> tuple[Order | None, list[int]]:
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
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody who asks whose it is
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        for each in (self._link, self._ends, self._end):
            each.close()
        os.setsid()
        for name in order.removed:
            os.environb.pop(name, None)
        os.environb.update(order.changed)
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

    def _report(self, report: Report) -> None:
        with contextlib.suppress(ConnectionError):  # the starter has gone, which the next read tells
            self._link.send(msgspec.msgpack.encode(report))


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
