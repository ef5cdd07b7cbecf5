"""What the contract tests of links work with: transports, addresses and threads that are cleaned up."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil
import pytest

from tpserve.api import Closed, DeadlineExceeded, Options, PeerLost, Transport, TransportError, TransportSpec
from tpserve.testing.processes import PATIENCE, Child, load

__all__ = [
    "LOOPBACK",
    "SLACK",
    "Lab",
    "Task",
    "asleep",
    "at_rest",
    "await_loss",
    "can_listen",
    "leaks_files",
    "leaks_names",
    "memory",
    "missed",
    "refused",
    "see_closed",
    "see_soon_after",
    "send_to_the_dead",
    "soon",
    "wake",
]

NOTICE = 5.0
"""Seconds within which the death of a peer is noticed. Built-in parts take a tenth of it, which is slack enough."""

SETTLING = 0.7
"""Seconds after which a link has heard of a death that it is told of, as by a broken connection."""

SLACK = 2.0
"""Seconds that a call may end after its deadline. Links take a tenth of it, but a machine may be busy."""

RESTLESS = 1 / 3
"""Share of a core from which on a wait counts as spinning: somebody may try anew now and then."""

DROWSY = 0.1
"""The same for who waits for what may come at any time, or never."""

WAKES = 400
"""And so often a second its process may wake up: half as often is what a library's own threads may come to."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 it is only listed
USES = 3

LOOPBACK = {"tcp": "127.0.0.1", "tcp6": "::1"}
"""Where the addresses of a scheme are."""

Result = TypeVar("Result")


class Task(Generic[Result]):
    """A function at work in a thread of its own."""

    def __init__(self, function: Callable[..., Result], *arguments: Any) -> None:
        self._name = getattr(function, "__qualname__", repr(function))
        self._outcome: list[Result] = []
        self._error: list[BaseException] = []

        def work() -> None:
            try:
                self._outcome.append(function(*arguments))
            except BaseException as error:  # noqa: BLE001 result() raises it
                self._error.append(error)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def result(self, patience: float | None = None) -> Result:
        """What the function returned, or raise what it raised, within so many seconds.

        None: a little more than PATIENCE, so that a call that ends at its deadline says what it waited for.
        """
        patience = PATIENCE + SLACK if patience is None else patience
        self._thread.join(patience)
        if self._thread.is_alive():
            raise AssertionError(
                f"{self._name} has not ended {patience:.0f} s later: a call must end at its deadline, and before it as"
                " soon as its peer leaves or another thread closes it"
            )
        for error in self._error:
            raise error
        return self._outcome[0]

    @property
    def is_done(self) -> bool:
        """Whether the function has returned."""
        return not self._thread.is_alive()


class Lab:
    """Makes transports, one for each process that a test imagines, and closes them.

    Args:
        spec: of the transport.
        options: for each.
        scheme: of the addresses, ``ipc`` or one in LOOPBACK.
    """

    def __init__(self, spec: TransportSpec, options: Options, scheme: str = "ipc") -> None:
        self.spec = spec
        self.options = options
        self.directory = Path(tempfile.mkdtemp(prefix="tps-"))
        self._scheme = scheme
        self._links = 0
        self._lock = threading.Lock()
        self._shared: Transport | None = None
        self._made: list[Transport] = []
        self._children: list[Child] = []

    def transport(self) -> Transport:
        """A process's transport. One that works inside a process only is the same for all of them."""
        with self._lock:
            if self._shared is not None:
                return self._shared
            made: Transport = load(self.spec.factory)(self.options)
            self._made.append(made)
            if not self.spec.capabilities.multi_process:
                self._shared = made
            return made

    def address(self) -> str:
        """A new address; for tcp, the ports that follow are free too."""
        self._links += 1
        if self._scheme == "ipc":
            return f"ipc://{self.directory}/link{self._links}"
        host = LOOPBACK[self._scheme]
        return f"tcp://[{host}]:{_port(host)}" if ":" in host else f"tcp://{host}:{_port(host)}"

    def child(self, role: str, **arguments: Any) -> Child:
        """A process that plays a role with this transport."""
        child = Child(self.spec, self.options, role, **arguments)
        self._children.append(child)
        return child

    def close_transports(self) -> None:
        """Close what was made so far."""
        for transport in self._made:
            transport.close()
        self._made.clear()
        self._shared = None

    def close(self) -> None:
        """End the children, close the transports and remove the directory."""
        for child in self._children:
            child.__exit__(None, None, None)
        try:
            self.close_transports()
        finally:
            shutil.rmtree(self.directory)


def soon() -> float:
    """A deadline that a working link keeps."""
    return time.monotonic() + PATIENCE


@contextmanager
def missed(seconds: float, says: str | None = None) -> Iterator[float]:
    """A deadline in so many seconds, which the call inside must miss; it says so soon after."""
    deadline = time.monotonic() + seconds
    with pytest.raises(DeadlineExceeded, match=says):
        yield deadline
    see_soon_after(deadline)


def see_soon_after(deadline: float) -> None:
    """See that a deadline, or another moment, is not long ago."""
    late = time.monotonic() - deadline
    assert late < SLACK, f"a call ends {late:.1f} s after its deadline"


def see_closed(*calls: Callable[[float], object]) -> None:
    """See that an end was closed: each call says so, whatever its deadline, and as often as it is tried."""
    for call in calls:
        for deadline in (soon(), 0.0):
            with pytest.raises(Closed):
                call(deadline)


@contextmanager
def refused(address: str) -> Iterator[None]:
    """See an address refused: an error that names it, or its path, and no deadline that passes in vain."""
    with pytest.raises(TransportError) as caught:
        yield
    assert not isinstance(caught.value, DeadlineExceeded)
    name, told = address.removeprefix("ipc://"), str(caught.value)
    assert name in told or repr(name)[1:-1] in told


def await_loss(task: Task[Any]) -> None:
    """See a call report its peer, which has just died, in time."""
    with pytest.raises(PeerLost):
        task.result(NOTICE)


def send_to_the_dead(send: Callable[[int], object]) -> None:
    """See the next send report a peer that has died a while ago; two may go the way of what is under way.

    Args:
        send: sends the frame, or the announcement, with a number.
    """
    time.sleep(SETTLING)
    try:
        for number in range(3):
            send(number)
            time.sleep(SETTLING / 3)
    except PeerLost:
        return
    pytest.fail("three sends to a peer that has died succeed")


def memory() -> int:
    """Bytes of this process that are in memory."""
    resident: int = psutil.Process().memory_info().rss
    return resident


def leaks_files(use: Callable[[], None]) -> bool:
    """Whether doing something once more leaves more descriptors open; a library may close some a little later."""
    use()
    time.sleep(SETTLING)
    before = _open_files()
    use()
    end = time.monotonic() + NOTICE
    while _open_files() > before:
        if time.monotonic() > end:
            return True
        time.sleep(SETTLING / 10)
    return False


def leaks_names(use: Callable[[], None]) -> bool:
    """Whether doing something leaves a name in shared memory, each time: others too make some there meanwhile."""
    made = []
    for _ in range(USES):
        before = _shared_names()
        use()
        made.append(_shared_names() - before)
    if all(made):
        time.sleep(SETTLING)
    return all(names & _shared_names() for names in made)


@contextmanager
def at_rest() -> Iterator[None]:
    """See that nothing that waits inside spins."""
    begun = time.monotonic()
    before = time.process_time()
    yield
    burnt, waited = time.process_time() - before, time.monotonic() - begun
    assert burnt < waited * RESTLESS, f"waiting for {waited:.1f} s takes {burnt:.1f} s of CPU time"


@contextmanager
def asleep() -> Iterator[None]:
    """See that what waits inside, for a second or more, takes next to no CPU time and does not look again and again.

    A waiting process leaves its core once, one that polls each time that it looks, however busy the machine is.
    """
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    yield
    waited, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF)
    burnt = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    wakes = after.ru_nvcsw - before.ru_nvcsw
    if burnt >= waited * DROWSY or wakes >= waited * WAKES:
        raise AssertionError(
            f"waiting for {waited:.1f} s takes {burnt:.2f} s of CPU time and wakes the process up {wakes} times:"
            " something polls. Let the kernel, or a lock, wake up who waits"
        )


def wake(receive: Callable[[], object], close: Callable[[], None]) -> bool:
    """Whether closing from this thread wakes a call that waits in another, with Closed."""
    waiting = Task(receive)
    time.sleep(0.1)
    close()
    try:
        waiting.result()
    except Closed:
        return True
    return False


def _open_files() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 iterdir opens one more


def _shared_names() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def can_listen(scheme: str) -> bool:
    """Whether this machine has addresses of a scheme."""
    return scheme not in LOOPBACK or _is_free(LOOPBACK[scheme], 0)


def _port(host: str) -> int:
    """The first of eight free ports in a row, below those that the kernel gives away; each process looks elsewhere."""
    rows = range(20_000, 32_000, 8)
    start = os.getpid() * 97
    for row in range(len(rows)):
        port = rows[(start + row) % len(rows)]
        if all(_is_free(host, port + offset) for offset in range(8)):
            return port
    raise AssertionError("no eight free ports in a row")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
