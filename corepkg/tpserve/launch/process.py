"""The starter's side of its children: starting them, and hearing all that happens from one place."""

from __future__ import annotations

import contextlib
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from tpserve.frontend.control import ControlEvent
from tpserve.launch.forkserver import Forked, ForkServer
from tpserve.launch.protocol import ChildSpec, Failed, Status, decode_status, line
from tpserve.stdio import open_descriptors

__all__ = ["Child", "Exited", "Happening", "Said", "Signalled", "Start", "Watch"]

ASK_SECONDS = 0.25
"""After how long a child that was asked to end is asked again."""
KILL_SECONDS = 5.0
"""How long a killed process may take to be gone; one that hangs in the kernel is left to its fate."""


class Start(msgspec.Struct, frozen=True):
    """All that is needed to start a child.

    Attributes:
        spec: what it is to be.
        environment: variables that it gets besides the starter's own.
        descriptors: file descriptors that it inherits, under the same numbers.
        is_forked: it comes from a fork server, for it needs torch.
    """

    spec: ChildSpec
    environment: Mapping[str, str] = {}
    descriptors: tuple[int, ...] = ()
    is_forked: bool = False


class Child:
    """One child process.

    Args:
        start: what it is to be.
        server: forks it; None: it is started by itself.

    Attributes:
        name: as in its spec.
        exit_code: None while it runs; a negative signal number if a signal ended it.
        failure: its last word, if it has said one.
        has_hung_up: nobody can report anything more.
        process: the process itself.
        status_fd: where its statuses arrive.
        exit_fd: readable when it has ended; None for one that was forked, of which the server tells.
    """

    def __init__(self, start: Start, server: ForkServer | None = None) -> None:
        self.name = start.spec.name
        self.exit_code: int | None = None
        self.failure: Failed | None = None
        self.has_hung_up = False
        self.exit_fd: int | None = None
        open_descriptors()
        self.status_fd, status_end = os.pipe()
        control_end, self._control = os.pipe()
        os.set_blocking(self.status_fd, False)
        spec = msgspec.structs.replace(
            start.spec,
            parent=server.pid if server else os.getpid(),
            status_fd=status_end,
            outlives_thread=server is None and threading.current_thread() is not threading.main_thread(),
        )
        environment = {**os.environ, **start.environment}
        inherited = (status_end, *start.descriptors)
        try:
            if server:
                descriptors = {0: control_end, **{number: number for number in inherited}}
                self.process: subprocess.Popen[bytes] | Forked = server.fork(environment, descriptors)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "tpserve.launch.child"],
                    stdin=control_end,
                    stdout=2,  # the starter's standard output is for its own results
                    env=environment,
                    pass_fds=inherited,
                    start_new_session=True,
                )
                self.exit_fd = os.pidfd_open(self.process.pid)
        finally:
            os.close(status_end)
            os.close(control_end)
        self._rest = b""
        self._write(line(spec))

    @property
    def is_unreported(self) -> bool:
        """It has ended, and nobody can tell how; it may have been in good order."""
        return isinstance(self.process, Forked) and self.process.is_unreported

    def send(self, event: ControlEvent) -> None:
        """Send an event; one that has ended does not get it."""
        if self.exit_code is None:
            self._write(line(event))

    def signal(self, signum: signal.Signals) -> None:
        """Send it a signal; nothing happens if it has ended."""
        self.process.send_signal(signum)

    def statuses(self) -> list[Status]:
        """Take the statuses that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.status_fd, 1 << 16):
                self._rest += chunk
            self.has_hung_up = True
        *lines, self._rest = self._rest.split(b"\n")
        statuses = [decode_status(text) for text in lines]
        self.failure = next((status for status in statuses if isinstance(status, Failed)), self.failure)
        return statuses

    def await_hangup(self, seconds: float) -> None:
        """Wait until it holds nothing any more: one whose parent was killed takes a moment to die."""
        poll = select.poll()
        poll.register(self.status_fd, 0)
        poll.poll(seconds * 1000)

    def reap(self) -> None:
        """Take the exit code of a process that has ended, and close all descriptors."""
        self.exit_code = self.process.wait()
        for descriptor in (self.status_fd, self.exit_fd, self._control):
            if descriptor is not None:
                os.close(descriptor)

    def describe_exit(self) -> str:
        """Say how it ended: ``exit code 1``, ``signal SIGKILL``."""
        if self.exit_code is None:
            return "still running"
        if self.is_unreported:
            return "no report of how: its fork server stands still"
        if isinstance(self.process, Forked) and self.process.server_exit_code is not None:
            return f"its fork server ({_describe(self.process.server_exit_code)})"
        return _describe(self.exit_code)

    def _write(self, text: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, text)


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


def _describe(exit_code: int) -> str:
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


def _ignore(signum: int, frame: object) -> None:
    """A handler that is there so that the signal wakes the selector and does nothing else."""
