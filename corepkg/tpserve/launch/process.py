"""The starter's side of its children: starting them, and hearing all that happens from one place."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from tpserve.frontend.control import ControlEvent
from tpserve.launch.protocol import ChildSpec, Failed, Status, decode_status, line
from tpserve.stdio import open_descriptors

__all__ = ["Child", "Exited", "Happening", "Said", "Signalled", "Start", "Watch"]

KILL_SECONDS = 5.0
"""How long a killed process may take to be gone; one that hangs in the kernel is left to its fate."""


class Start(msgspec.Struct, frozen=True):
    """All that is needed to start a child.

    Attributes:
        spec: what it is to be.
        environment: variables that it gets besides the starter's own.
        descriptors: file descriptors that it inherits, under the same numbers.
    """

    spec: ChildSpec
    environment: Mapping[str, str] = {}
    descriptors: tuple[int, ...] = ()


class Child:
    """One child process.

    Attributes:
        name: as in its spec.
        pid: its process id.
        exit_code: None while it runs; a negative signal number if a signal ended it.
        failure: its last word, if it has said one.
        status_fd: where its statuses arrive.
        exit_fd: readable when it has ended.
    """

    def __init__(self, start: Start) -> None:
        self.name = start.spec.name
        self.exit_code: int | None = None
        self.failure: Failed | None = None
        open_descriptors()
        self.status_fd, status_end = os.pipe()
        spec = msgspec.structs.replace(
            start.spec,
            parent=os.getpid(),
            status_fd=status_end,
            outlives_thread=threading.current_thread() is not threading.main_thread(),
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tpserve.launch.child"],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=2,  # the starter's standard output is for its own results
                env={**os.environ, **start.environment},
                pass_fds=(status_end, *start.descriptors),
                start_new_session=True,
            )
        finally:
            os.close(status_end)
        os.set_blocking(self.status_fd, False)
        self.pid = self._process.pid
        self.exit_fd = os.pidfd_open(self.pid)
        self._rest = b""
        self._write(line(spec))

    def send(self, event: ControlEvent) -> None:
        """Send an event; one that has ended does not get it."""
        if self.exit_code is None:
            self._write(line(event))

    def signal(self, signum: signal.Signals) -> None:
        """Send it a signal; nothing happens if it has ended."""
        self._process.send_signal(signum)

    def statuses(self) -> list[Status]:
        """Take the statuses that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.status_fd, 1 << 16):
                self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        statuses = [decode_status(text) for text in lines]
        self.failure = next((status for status in statuses if isinstance(status, Failed)), self.failure)
        return statuses

    def reap(self) -> None:
        """Take the exit code of a process that has ended, and close all descriptors."""
        self.exit_code = self._process.wait()
        os.close(self.status_fd)
        os.close(self.exit_fd)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def describe_exit(self) -> str:
        """Say how it ended: ``exit code 1``, ``signal SIGKILL``."""
        if self.exit_code is None:
            return "still running"
        if self.exit_code < 0:
            return f"signal {signal.Signals(-self.exit_code).name}"
        return f"exit code {self.exit_code}"

    def _write(self, text: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(text)


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

    Attributes:
        children: those that have been started here and have not ended, in the order of their start.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._happenings: deque[Happening] = deque()

    def start(self, start: Start) -> Child:
        """Start a child and watch it."""
        child = Child(start)
        self.children.append(child)
        self._selector.register(child.status_fd, selectors.EVENT_READ, child)
        self._selector.register(child.exit_fd, selectors.EVENT_READ, child)
        return child

    def next(self, deadline: float) -> Happening | None:
        """Wait for the next happening, or until ``deadline`` on the monotonic clock: then None."""
        while not self._happenings:
            remaining = deadline - time.monotonic()
            ready = self._selector.select(None if math.isinf(remaining) else max(remaining, 0.0))
            for key, _ in ready:
                self._happenings.extend(self._read(key))
            if not ready and remaining <= 0:
                return None
        return self._happenings.popleft()

    def end(self, children: Iterable[Child], grace: float) -> None:
        """Make children end: ask with SIGTERM, wait ``grace`` seconds, then kill.

        Signals that come meanwhile are kept and cut the grace short; all else that happens is dropped.
        """
        signals: list[Happening] = []
        for signum, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_SECONDS)):
            running = [child for child in children if child.exit_code is None]
            deadline = time.monotonic() + seconds
            for child in running:
                child.signal(signum)
            while any(child.exit_code is None for child in running):
                happening = self.next(deadline)
                if isinstance(happening, Signalled):
                    signals.append(happening)
                if happening is None or (signals and signum is signal.SIGTERM):
                    break
        self._happenings.extendleft(reversed(signals))

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
        self._selector.close()

    def _read(self, key: selectors.SelectorKey) -> list[Happening]:
        child: Child | None = key.data
        if child is None:
            assert isinstance(key.fileobj, socket.socket)
            return [Signalled(signal.Signals(number)) for number in key.fileobj.recv(64)]
        if child.exit_code is not None:
            return []
        said: list[Happening] = [Said(child, status) for status in child.statuses()]
        if key.fd != child.exit_fd:
            return said
        self._selector.unregister(child.status_fd)
        self._selector.unregister(child.exit_fd)
        self.children.remove(child)
        child.reap()
        return [*said, Exited(child)]


def _ignore(signum: int, frame: object) -> None:
    """A handler that is there so that the signal wakes the selector and does nothing else."""
