"""All that happens to the children of a process, heard from one place; and their ends."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from tpserve.launch.forkserver import Forked, ForkServer
from tpserve.launch.process import Child, Start
from tpserve.launch.protocol import Status

__all__ = ["Exited", "Happening", "Said", "Signalled", "Watch"]

ASK_SECONDS = 0.25
"""After how long a child that was asked to end is asked again."""
KILL_SECONDS = 5.0
"""How long a killed process may take to be gone; one that hangs in the kernel is left to its fate."""


class Said(msgspec.Struct, frozen=True):
    """A child reported something."""

    child: Child
    status: Status


class Exited(msgspec.Struct, frozen=True):
    """A child has ended and been reaped."""

    child: Child


class Signalled(msgspec.Struct, frozen=True):
    """This process got a signal."""

    signum: signal.Signals


Happening = Said | Exited | Signalled


class Watch:
    """Waits for what children say, for their ends, and for signals, all at once.

    Args:
        modules: what children that are forked find imported.

    Attributes:
        children: those that have been started here and have not ended, in the order of their start.
    """

    def __init__(self, modules: Sequence[str] = ("torch", "tpserve.launch.roles")) -> None:
        self.children: list[Child] = []
        self._modules = modules
        self._server: ForkServer | None = None
        self._silent: dict[Child, float] = {}  # forked children that have hung up, and when to look for no report more
        self._selector = selectors.DefaultSelector()
        self._happenings: deque[Happening] = deque()

    def start(self, start: Start) -> Child:
        """Start a child and watch it."""
        child = Child(start, self._fork_server(start) if start.is_forked else None)
        self.children.append(child)
        self._selector.register(child.status_fd, selectors.EVENT_READ, child)
        if child.exit_fd is not None:
            self._selector.register(child.exit_fd, selectors.EVENT_READ, child)
        return child

    def next(self, deadline: float) -> Happening | None:
        """Wait for the next happening, or until ``deadline`` on the monotonic clock: then None."""
        while not self._happenings:
            wake = min(deadline, *self._silent.values(), math.inf)
            ready = self._selector.select(None if math.isinf(wake) else max(wake - time.monotonic(), 0.0))
            for key, _ in ready:
                self._happenings.extend(self._read(key))
            now = time.monotonic()
            if self._server and any(due <= now for due in self._silent.values()):
                self._happenings.extend(self._kill_server(self._server))
            elif not self._happenings and now >= deadline:
                return None
        return self._happenings.popleft()

    def end(self, children: Iterable[Child], grace: float) -> None:
        """Make children end: ask with SIGTERM, wait ``grace`` seconds, then kill.

        It asks again and again, for two SIGTERMs that wait for a child at once become one: perhaps that of a stranger,
        which the child does not heed. Signals to this process cut the grace short. They are kept for ``next``, and so
        is what happens to others; what these children have said and how they ended is dropped.
        """
        ending = list(children)
        kept: list[Happening] = []
        for signum, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_SECONDS)):
            again = time.monotonic()
            deadline = again + seconds
            while running := [child for child in ending if child.exit_code is None]:
                now = time.monotonic()
                if now >= again:
                    again = now + ASK_SECONDS
                    for child in running:
                        child.signal(signum)
                happening = self.next(min(again, deadline))
                if happening is not None:
                    kept.append(happening)
                elif time.monotonic() >= deadline:
                    break
                if signum is signal.SIGTERM and any(isinstance(happening, Signalled) for happening in kept):
                    break
        kept += self._happenings
        self._happenings = deque(each for each in kept if isinstance(each, Signalled) or each.child not in ending)
        if self._server and any(child.exit_code is None for child in ending if isinstance(child.process, Forked)):
            self._kill_server(self._server)  # it does not do what it was told

    @contextmanager
    def signals(self, *signums: signal.Signals) -> Iterator[None]:
        """Turn signals into happenings. Only in the main thread."""
        reader, writer = socket.socketpair()
        with reader, writer:
            reader.setblocking(False)
            writer.setblocking(False)
            self._selector.register(reader, selectors.EVENT_READ, None)
            former = {signum: signal.signal(signum, _ignore) for signum in signums}
            former_fd = signal.set_wakeup_fd(writer.fileno())
            try:
                yield
            finally:
                signal.set_wakeup_fd(former_fd)
                for signum, handler in former.items():
                    signal.signal(signum, handler)
                self._selector.unregister(reader)

    def close(self) -> None:
        """Kill whatever still runs."""
        self.end(list(self.children), grace=0.0)
        self._dismiss_server()
        self._selector.close()

    def _fork_server(self, start: Start) -> ForkServer:
        """The fork server, with the variables of the first that it forks: they count when torch is loaded."""
        if self._server is None:
            self._server = ForkServer({**os.environ, **start.environment}, self._modules)
            self._selector.register(self._server, selectors.EVENT_READ, self._server)
        return self._server

    def _read(self, key: selectors.SelectorKey) -> list[Happening]:
        source: Child | ForkServer | None = key.data
        if source is None:
            assert isinstance(key.fileobj, socket.socket)
            return [Signalled(signal.Signals(number)) for number in key.fileobj.recv(64)]
        if isinstance(source, ForkServer):
            return self._read_server(source)
        if source.exit_code is not None:
            return []
        if key.fd == source.exit_fd:
            return self._bury(source)
        said: list[Happening] = [Said(source, status) for status in source.statuses()]
        if source.has_hung_up:
            self._selector.unregister(source.status_fd)
            if source.exit_fd is None:
                self._silent[source] = time.monotonic() + KILL_SECONDS
        return said

    def _read_server(self, server: ForkServer) -> list[Happening]:
        ended = [child for process in server.ended() for child in self.children if child.process is process]
        if server.is_gone:
            self._dismiss_server()
            for child in ended:
                child.await_hangup(KILL_SECONDS)
        return [happening for child in ended for happening in self._bury(child)]

    def _kill_server(self, server: ForkServer) -> list[Happening]:
        """Kill it with its children; their ends."""
        for child in self._silent:
            if isinstance(child.process, Forked):
                child.process.is_unreported = True
        server.kill()
        happenings: list[Happening] = []
        while self._server is server:
            happenings += self._read_server(server)
        return happenings

    def _dismiss_server(self) -> None:
        if self._server is not None:
            self._selector.unregister(self._server)
            self._server.close()
            self._server = None

    def _bury(self, child: Child) -> list[Happening]:
        """What a child that has ended said before."""
        said: list[Happening] = [Said(child, status) for status in child.statuses()]
        self._silent.pop(child, None)
        if child.status_fd in self._selector.get_map():
            self._selector.unregister(child.status_fd)
        if child.exit_fd is not None:
            self._selector.unregister(child.exit_fd)
        self.children.remove(child)
        child.reap()
        return [*said, Exited(child)]


def _ignore(signum: int, frame: object) -> None:
    """A handler that is there so that the signal wakes the selector and does nothing else."""
