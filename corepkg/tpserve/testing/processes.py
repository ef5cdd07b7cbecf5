"""Child processes for the contract tests: an end of a link in a process that may be stopped or killed.

``python -m tpserve.testing.processes`` reads a :class:`Job` as one JSON line on stdin, and reports in JSON lines on
stdout.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tpserve.api import (
    Announcement,
    FanoutReceiver,
    FanoutSender,
    Options,
    PipeSender,
    Spec,
    Sync,
    SyncContext,
    TpserveError,
    Transport,
)

__all__ = ["PATIENCE", "Child", "fanout_end", "load", "number_of", "numbered"]

PATIENCE = float(os.environ.get("TPSERVE_TESTING_PATIENCE", "60"))
"""Seconds after which a test counts as hung; ``tpserve plugins check --limit`` sets it."""

CHUNK = 50

CONTENT = random.Random(0).randbytes(4093) * 300
"""What frames are cut from. Its period is a prime number, so that no piece of a frame that has the size of a buffer, or
of half the frame, passes for another; and short, so that transports which compress are no slower than others."""

SyncMaker = Callable[[SyncContext], Sync]


class Job(msgspec.Struct, frozen=True):
    """What a child does.

    Attributes:
        role: a name in ROLES.
        factory: ``module:Class`` of the part.
        options_type: ``module:Class`` of its options.
        options: the options, as builtins.
        arguments: of the role.
    """

    role: str
    factory: str
    options_type: str
    options: dict[str, Any]
    arguments: dict[str, Any]


class Child:
    """A child process at work.

    Args:
        spec: the part that it uses.
        options: for that part.
        role: what it does, a name in ROLES.
        arguments: of the role.
    """

    def __init__(self, spec: Spec, options: Options, role: str, **arguments: Any) -> None:
        options_type = f"{type(options).__module__}:{type(options).__qualname__}"
        job = Job(role, spec.factory, options_type, msgspec.to_builtins(options), arguments)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tpserve.testing.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def report(self) -> dict[str, Any]:
        """The next thing that the child reports."""
        line = self._lines.get(timeout=PATIENCE)
        assert line, f"the child left with {self._process.wait(PATIENCE)} and said nothing more"
        report: dict[str, Any] = json.loads(line)
        return report

    def meeting(self) -> Self:
        """Wait until the child's end looks for the others."""
        report = self.report()
        assert report == {"meeting": True}, report
        return self

    def ready(self) -> Self:
        """Wait until the child's end is connected."""
        report = self.report()
        if report == {"meeting": True}:
            report = self.report()
        assert report == {"ready": True}, report
        return self

    def send(self, number: signal.Signals) -> None:
        """Send SIGSTOP, SIGCONT or SIGKILL."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until the child has left; its exit code."""
        return self._process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")


def load(name: str) -> Any:
    """Import ``module:Class``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def numbered(number: int, size: int = 300) -> bytes:
    """A frame of 8 bytes or more that says which it is, and shows any of its bytes that is not in its place."""
    start = number % 1000
    end = start + size - 8
    content = CONTENT if end <= len(CONTENT) else CONTENT * (1 + end // len(CONTENT))
    return number.to_bytes(8, "little") + content[start:end]


def number_of(frame: bytes) -> int:
    """Which frame it is."""
    return int.from_bytes(frame[:8], "little")


def follow(transport: Transport, address: str, follower: int, followers: int) -> None:
    """Read numbered frames as a follower until an empty one comes."""
    end = transport.fanout_receiver(address, follower, followers)
    _connect(end)
    received = 0
    in_order = True
    try:
        while True:
            (frame,) = end.recv_many(1, _soon())
            if not frame:
                break
            in_order &= frame == numbered(received, len(frame))
            received += 1
    except TpserveError as error:
        _report(error=type(error).__name__, received=received, in_order=in_order)
        return
    _report(received=received, in_order=in_order)


def lead(transport: Transport, address: str, followers: int, count: int) -> None:
    """Send ``count`` numbered frames as the leader, and then live on."""
    end = transport.fanout_sender(address, followers)
    _connect(end)
    for number in range(count):
        end.send_many([numbered(number)], _soon())
    _report(sent=count)
    time.sleep(PATIENCE)


def occupy(transport: Transport, addresses: list[str], followers: int) -> None:
    """Make the binding end at each address, of a pipe if there are no followers, and then live on."""
    for address in addresses:
        if followers:
            transport.fanout_sender(address, followers)
        else:
            transport.pipe_receiver(address)
    _report(ready=True)
    time.sleep(PATIENCE)


def collect(transport: Transport, address: str) -> None:
    """Read numbered frames from a pipe until an empty one comes."""
    end = transport.pipe_receiver(address)
    _report(ready=True)
    received = 0
    in_order = True
    while True:
        for frame in end.recv_many(CHUNK, 1 << 30, math.inf):
            if not frame:
                _report(received=received, in_order=in_order)
                return
            in_order &= frame == numbered(received, len(frame))
            received += 1


def gather(transport: Transport, address: str, count: int) -> None:
    """Read ``count`` numbered frames from a pipe, whoever sends them."""
    end = transport.pipe_receiver(address)
    _report(ready=True)
    frames: list[bytes] = []
    while len(frames) < count:
        frames += end.recv_many(count - len(frames), 1 << 30, math.inf)
    are_whole = all(frame == numbered(number_of(frame), len(frame)) for frame in frames)
    _report(numbers=sorted(map(number_of, frames)), are_whole=are_whole)


def feed(transport: Transport, address: str, count: int) -> None:
    """Send ``count`` numbered frames into a pipe, close in good order and leave."""
    end = transport.pipe_sender(address)
    _connect(end)
    for number in range(count):
        end.send(numbered(number), _soon())
    _report(sent=count)


def sync_lead(make: SyncMaker, count: int, **place: Any) -> None:
    """Announce ``count`` rounds as rank 0, and then live on."""
    sync = _join(make, rank=0, **place)
    for number in range(count):
        sync.announce(Announcement(number, 0, 0, -1, 0), _soon())
    _report(sent=count)
    time.sleep(PATIENCE)


def sync_follow(make: SyncMaker, rank: int, **place: Any) -> None:
    """Read announcements until something happens."""
    sync = _join(make, rank=rank, **place)
    received = 0
    try:
        while True:
            sync.receive(_soon())
            received += 1
    except TpserveError as error:
        _report(error=type(error).__name__, received=received)


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role for role in (follow, lead, occupy, collect, gather, feed, sync_lead, sync_follow)
}


def main() -> None:
    """Do the job that stdin names."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    factory, options = load(job.factory), msgspec.convert(job.options, load(job.options_type))
    role = ROLES[job.role]
    if issubclass(factory, Transport):
        transport = factory(options)
        role(transport, **job.arguments)
        transport.close()
    else:
        role(partial(factory, options), **job.arguments)


def fanout_end(transport: Transport, address: str, rank: int, size: int) -> FanoutSender | FanoutReceiver:
    """A rank's end of a fan-out, not yet connected."""
    if rank == 0:
        return transport.fanout_sender(address, size - 1)
    return transport.fanout_receiver(address, rank - 1, size - 1)


def _join(make: SyncMaker, rank: int, size: int, run_dir: str, fanout: list[str] | None) -> Sync:
    """Make a rank's sync and connect it; ``fanout`` names the transport and its options' type, if it needs one."""
    factory, options_type = fanout or ["tpserve.transports.inproc:InprocTransport", "tpserve.api:NoOptions"]
    end = fanout_end(load(factory)(load(options_type)()), f"ipc://{run_dir}/fanout", rank, size)
    if fanout:
        end.connect(_soon())
    sync = make(SyncContext(rank, size, Path(run_dir), "sync", end))
    _connect(sync)
    return sync


def _connect(end: FanoutSender | FanoutReceiver | PipeSender | Sync) -> None:
    _report(meeting=True)
    end.connect(_soon())
    _report(ready=True)


def _soon() -> float:
    return time.monotonic() + PATIENCE


def _report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201 stdout is how a child talks to its test


if __name__ == "__main__":
    main()
