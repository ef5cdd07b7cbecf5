"""Who leads at an address in the file system: a file that the leader holds a lock on while it lives.

The kernel takes the lock away when a process ends, so that the file of a leader that was killed is told from a living
one's; and each follower has a lock on a byte of it, by which the leader sees that it lives. It says by its first line
that it is such a file, so that nobody else's is taken for one; in the second, where the leader's group meets; in each
that follows, which follower has come, and a name that tells it from its doubles.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tpserve.api import TransportError
from tpserve.api.addresses import alone_in

__all__ = ["Claim", "Visit", "join_leader"]

MAGIC = b"tpserve gloo fan-out 1"
LONGEST = 1 << 16
FLOCK = struct.Struct("hhqqi4x")
"""What the kernel is asked about a lock: its kind, from where its bytes count, the first, how many, and whose it is."""

LONGEST_NAME = 200
"""Bytes of an address's last part: names that begin with it have to be names of files too."""


class Claim:
    """The leader's hold on an address.

    Args:
        path: the address.

    Attributes:
        meeting: the path of a directory where the group can meet; no other group has met there.

    Raises:
        TransportError: a living leader has it, something that is no leader's is there, or no file can be made there.
    """

    def __init__(self, path: Path) -> None:
        _check_name(path)
        self._path = path
        try:
            with alone_in(path.parent):
                _remove_stale(path)
                self._descriptor, self.meeting = _place(path)
        except OSError as error:
            raise TransportError(f"cannot lead at {path}: {error}") from error

    def came(self) -> list[int]:
        """Which followers have come, of whatever number of them they think."""
        return sorted(map(int, _names(os.pread(self._descriptor, LONGEST, 0))))

    def has_lost(self, follower: int) -> bool:
        """Whether a follower that came has gone."""
        return _is_unmarked(self._descriptor, follower)

    def close(self) -> None:
        """Remove the file, and with it the lock."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class Visit(NamedTuple):
    """A follower's place at a leader's.

    Attributes:
        meeting: where the group meets.
        descriptor: of the leader's file; the leader sees that it is closed.
    """

    meeting: Path
    descriptor: int

    def has_lost_leader(self) -> bool:
        """Whether the leader has gone."""
        return _lock(self.descriptor, fcntl.LOCK_SH)

    def has_lost(self, follower: int) -> bool:
        """Whether another follower, who came, has gone."""
        return _is_unmarked(self.descriptor, follower)

    def close(self) -> None:
        """Go."""
        os.close(self.descriptor)


def join_leader(path: Path, follower: int, name: bytes) -> Visit | None:
    """Tell the leader at an address that a follower has come, or None: there is no leader yet.

    Args:
        path: the address.
        follower: its number.
        name: nobody else's.

    Raises:
        TransportError: something that is no leader's is there, or another follower of this number has come before; or
            no leader can be there.
    """
    _check_name(path)
    try:
        with _opened(path) as descriptor:
            meeting = _meeting(path, descriptor)
            if _lock(descriptor, fcntl.LOCK_SH):
                return None
            # First the lock: who has come and has none is taken for dead.
            if not _mark(descriptor, follower):
                raise TransportError(f"ipc://{path} has a follower {follower} already")
            os.write(descriptor, b"%d %s\n" % (follower, name))
            if _names(os.pread(descriptor, LONGEST, 0))[b"%d" % follower] != name:
                raise TransportError(f"ipc://{path} has had a follower {follower} already")
            return Visit(meeting, os.dup(descriptor))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransportError(f"cannot follow at {path}: {error}") from error


def _check_name(path: Path) -> None:
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        raise TransportError(f"cannot use ipc://{path}: its last part is longer than {LONGEST_NAME} bytes")


def _mark(descriptor: int, follower: int) -> bool:
    """Lock a follower's byte, unless another has."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, follower, 1, 0))
    except BlockingIOError:
        return False
    return True


def _is_unmarked(descriptor: int, follower: int) -> bool:
    """Whether nobody else has a lock on a follower's byte."""
    asked = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, follower, 1, 0)
    kind, *_ = FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
    return bool(kind == fcntl.F_UNLCK)


def _names(content: bytes) -> dict[bytes, bytes]:
    """Who has come first as which follower."""
    came = [line.split(b" ") for line in content.splitlines()[2:]]
    return dict(reversed(came))


def _remove_stale(path: Path) -> None:
    """Remove what a killed leader has left: followers that read it would look for their peers where they were."""
    with suppress(FileNotFoundError), _opened(path) as descriptor:
        meeting = _meeting(path, descriptor)
        if not _lock(descriptor, fcntl.LOCK_SH):
            raise TransportError(f"cannot use ipc://{path}: it has a leader already")
        shutil.rmtree(meeting, ignore_errors=True)
        path.unlink()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # What it is, is not known yet: opening a fifo might wait, and a link leads somewhere else.
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _meeting(path: Path, descriptor: int) -> Path:
    """Where the group meets, if this is a leader's file."""
    magic, _, rest = os.read(descriptor, LONGEST).partition(b"\n")
    name = os.fsdecode(rest.partition(b"\n")[0])
    if magic != MAGIC or not name.startswith(f"{path.name}.") or not {"/", "\0"}.isdisjoint(name):
        raise TransportError(f"cannot use ipc://{path}: there is a file that is no leader's")
    return path.with_name(name)


def _place(path: Path) -> tuple[int, Path]:
    """Write and lock the file, and only then let it be seen."""
    descriptor, made = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    meeting = Path(f"{made}.group")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, b"%s\n%s\n" % (MAGIC, os.fsencode(meeting.name)))
        os.link(made, path)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        os.unlink(made)  # noqa: PTH108 it has a name, not a path
    return descriptor, meeting


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
