"""The child's side of supervision: ``python -m tpserve.launch.child``.

A child does not outlive its starter: the kernel kills it when the starter's thread ends, and the end of its standard
input, which only the starter holds open, makes it leave as well. Ctrl-C in a terminal does not reach it: it lives in
a session of its own and ignores SIGINT. Of SIGTERM it heeds only its parent's: a service manager that stops a server
sends one to every process, and then the supervisor drains. It may send SIGHUP as well, which children ignore, too.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from tpserve.errors import DeadlineExceeded, PeerLost, TpserveError, UserError
from tpserve.frontend.control import ControlEvent, PingEvent
from tpserve.launch.logging import set_up_logging
from tpserve.launch.protocol import Alive, ChildSpec, Failed, Status, decode_event, line
from tpserve.launch.pulse import Pulse
from tpserve.parent import die_with_parent
from tpserve.stdio import secure_streams

__all__ = ["Line", "Main"]

logger = logging.getLogger(__name__)


class Line:
    """A child's line to its supervisor.

    Attributes:
        pulse: of the main loop; pings are answered while it beats. None: they are received like other events.
    """

    def __init__(self, status_fd: int) -> None:
        self.pulse: Pulse | None = Pulse()
        self._status_fd = status_fd
        self._events: SimpleQueue[ControlEvent] = SimpleQueue()

    def receive(self) -> ControlEvent:
        """Wait for the next event."""
        return self._events.get()

    def report(self, status: Status) -> None:
        """Tell the supervisor something; from any thread."""
        os.write(self._status_fd, line(status))

    def listen(self, lines: Iterator[bytes]) -> None:
        """Queue events as they come; when they end, the supervisor is gone, and this process leaves at once."""
        for text in lines:
            event = decode_event(text)
            if not isinstance(event, PingEvent) or self.pulse is None:
                self._events.put(event)
            elif self.pulse.beats():
                self.report(Alive())
        os._exit(1)


Main = Callable[[Line, msgspec.Raw], None]
"""What a child does: returns when its work is done."""


def main() -> None:
    """Become what the first line of standard input says."""
    secure_streams()
    sys.stdout = sys.stderr  # as their descriptors are the same
    die_with_parent(signal.SIGKILL)
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    _heed_parent_alone()
    lines = _lines(_take_stdin())
    text = next(lines, None)
    if text is None:
        return
    spec = msgspec.json.decode(text, type=ChildSpec)
    if os.getppid() != spec.parent:
        return
    if spec.outlives_thread:
        die_with_parent(0)
    os.set_inheritable(spec.status_fd, False)
    link = Line(spec.status_fd)
    threading.Thread(target=link.listen, args=(lines,), name="events", daemon=True).start()
    _dress(spec)
    try:
        _load(spec.main)(link, spec.payload)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor hears of it and prints it once
        _leave_failed(link, error)
    logging.shutdown()


def _heed_parent_alone() -> None:
    """Let no SIGTERM through but the parent's. Before any other thread starts, for those inherit what is blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def sift() -> None:
        while True:
            if signal.sigwaitinfo({signal.SIGTERM}).si_pid == os.getppid():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                signal.raise_signal(signal.SIGTERM)
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    threading.Thread(target=sift, name="sigterm", daemon=True).start()


def _take_stdin() -> int:
    """Move standard input to a descriptor that this process's own children do not inherit."""
    control = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control


def _lines(descriptor: int) -> Iterator[bytes]:
    rest = b""
    while chunk := os.read(descriptor, 1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _dress(spec: ChildSpec) -> None:
    from setproctitle import setproctitle

    setproctitle(f"tpserve: {spec.name}")
    faulthandler.enable()
    set_up_logging(spec.place, spec.log_level)
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)


def _load(reference: str) -> Main:
    module, _, name = reference.partition(":")
    main: Main = getattr(importlib.import_module(module), name)
    return main


def _leave_failed(link: Line, error: BaseException) -> NoReturn:
    """Report and go, without the finalisers of libraries whose peers may be gone."""
    if isinstance(error, UserError):
        failed = Failed(error=error.message, hint=error.hint, is_user_error=True)
    else:
        # An error raised on purpose says all there is to say.
        text = "" if isinstance(error, TpserveError) else "".join(traceback.format_exception(error))
        failed = Failed(error=f"{type(error).__name__}: {error}", traceback=text, is_consequence=_is_consequence(error))
    logger.debug("failed", exc_info=error)
    with suppress(BrokenPipeError):  # the supervisor has gone, and there is nobody to tell
        link.report(failed)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)


def _is_consequence(error: BaseException | None) -> bool:
    """Whether another process was lost, here or in the cause of what failed here."""
    while error is not None:
        if isinstance(error, (PeerLost, DeadlineExceeded)):
            return True
        error = error.__cause__
    return False


if __name__ == "__main__":
    main()
