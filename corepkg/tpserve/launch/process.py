"""The starter's side of one child: starting it, writing to it, and how it ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

import msgspec

from tpserve.frontend.control import ControlEvent
from tpserve.launch.forkserver import Forked, ForkServer
from tpserve.launch.protocol import ChildSpec, Failed, Status, decode_status, line
from tpserve.stdio import open_descriptors

__all__ = ["Child", "Start"]


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


def _describe(exit_code: int) -> str:
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
