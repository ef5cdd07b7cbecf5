"""The run directory: where one server's sockets and rendezvous files lie, and how a dead server's get swept.

Every server has a directory of its own, private to the user, under ``$XDG_RUNTIME_DIR/tpserve`` or
``/tmp/tpserve-<uid>``. The file ``pid`` in it is locked (flock) for as long as its server lives; the kernel unlocks it
whatever way the server ends. So a directory whose file is not locked belongs to nobody, and the next start removes it,
with the shared-memory segments whose names begin with ``tpserve-<name of the directory>-``
(:mod:`tpserve.launch.layout` names them).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tpserve.errors import LaunchError

__all__ = ["RunDir", "making", "remove_segments", "run_base"]

LONGEST_BASE = 60
"""A unix socket's path has at most 107 bytes; what a layout and a transport put behind the base takes the others."""

MOST_FILES = 64
"""More than a server makes; with two ranks it makes a dozen."""

SHM = Path("/dev/shm")  # noqa: S108 (names in it are unpredictable and made exclusively)


class RunDir:
    """One server's private directory; make it with :meth:`create`.

    Attributes:
        path: the directory, mode 0700. Its name is unique on this machine.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, base: Path | None = None) -> Self:
        """Sweep what dead servers left in ``base`` (:func:`run_base` unless given), then make a new directory in it.

        Raises:
            LaunchError: ``base`` belongs to someone else, is open to others, or nothing can be made in it.
        """
        base = base or run_base()
        path = base / secrets.token_hex(4)
        with making(path), _base_lock(base):
            _sweep(base)
            _check_room(base)
            path.mkdir(mode=0o700)
            try:
                return cls(path, _lock(path / "pid"))
            except OSError:
                _remove(path)
                raise

    def remove(self) -> None:
        """Remove the directory and this server's shared memory. May be called twice."""
        if self._lock < 0:
            return
        _remove(self.path)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def run_base(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory that holds this user's run directories."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and len(runtime) < LONGEST_BASE and _is_private(Path(runtime)):
        return Path(runtime) / "tpserve"
    return Path("/tmp") / f"tpserve-{os.getuid()}"  # noqa: S108 (checked to be ours and private)


def remove_segments(prefix: str) -> None:
    """Remove this machine's shared-memory segments whose names begin with ``prefix``."""
    for segment in SHM.glob(f"{prefix}*"):
        segment.unlink(missing_ok=True)


@contextmanager
def making(path: Path) -> Iterator[None]:
    """What the file system refuses, as an error for a person.

    Raises:
        LaunchError: it has no room, or does not allow it.
    """
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"the run directory {path} cannot be made: {error.strerror}",
            "Make room there, or point XDG_RUNTIME_DIR at another private directory.",
        ) from error


def _check_room(base: Path) -> None:
    """Raise the error of a file system that has no room for files, before processes find it out one by one."""
    room = os.statvfs(base)
    if room.f_files and room.f_favail < MOST_FILES:  # some file systems do not count them
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lock(path: Path) -> int:
    """Make and lock the file that tells that a server lives."""
    lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"{os.getpid()}\n".encode())
    except OSError:
        os.close(lock)
        raise
    return lock


@contextmanager
def _base_lock(base: Path) -> Iterator[None]:
    """Hold the base directory, so that nobody sweeps a directory that is being made."""
    base.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(base):
        raise LaunchError(
            f"{base} must be a directory that belongs to this user with mode 0700",
            "Remove it, or point XDG_RUNTIME_DIR at a private directory.",
        )
    lock = os.open(base / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_private(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _sweep(base: Path) -> None:
    for path in base.iterdir():
        if path.is_dir() and not _is_alive(path):
            _remove(path)


def _is_alive(path: Path) -> bool:
    try:
        lock = os.open(path / "pid", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _remove(path: Path) -> None:
    remove_segments(f"tpserve-{path.name}-")
    shutil.rmtree(path, ignore_errors=True)
