"""What an end sleeps on: a bell that others ring, and the sockets of its peers.

After the welcome nobody says anything on a socket, so something to read there is the end: whatever way a process dies,
the kernel closes its sockets. A bell that was rung while nobody slept stays rung, so no wake-up gets lost.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from threading import Lock
from types import TracebackType

from tpserve.api import Closed, DeadlineExceeded

__all__ = ["Watch", "probe"]

LONGEST = 3600.0


class Watch:
    """One end's; as a context manager it lets one thread at a time in, and none once it is shut.

    Attributes:
        bell: an event; others ring it by a copy of this descriptor.
    """

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self.bell, select.POLLIN)
        self._lock = Lock()
        self._shut = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._shut:
            self._lock.release()
            raise Closed("the fan-out was closed")

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def add(self, end: socket.socket) -> None:
        """Watch a socket too."""
        self._poll.register(end, select.POLLIN)

    def remove(self, end: socket.socket) -> None:
        """Watch it no more."""
        self._poll.unregister(end)

    def look(self, seconds: float = 0.0) -> list[int]:
        """The descriptors of sockets where there is something; sleeps until then, the bell or so many seconds."""
        found = [descriptor for descriptor, _ in self._poll.poll(1000 * seconds)]
        if self.bell in found:
            os.eventfd_read(self.bell)
            found.remove(self.bell)
        return found

    def wait(self, deadline: float, late: str, longest: float = LONGEST) -> list[int]:
        """The same; for ``longest`` seconds at most.

        Raises:
            DeadlineExceeded: the deadline had passed; ``late`` says what was waited for.
            Closed: the end was closed meanwhile.
        """
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise DeadlineExceeded(late)
        found = self.look(min(seconds, longest))
        if self._shut:
            raise Closed("the fan-out was closed")
        return found

    def shut(self) -> bool:
        """Wake the thread that is inside, and return once it has left. Whether this is the first time."""
        if self._shut:
            return False
        self._shut = True
        os.eventfd_write(self.bell, 1)
        with self._lock:
            os.close(self.bell)
        return True


def probe() -> str | None:
    """Why this transport does not work on this machine, or None."""
    if sys.platform != "linux":
        return f"needs Linux, and this is {sys.platform}"
    return None
