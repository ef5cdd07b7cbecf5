"""Gloo groups without torch.distributed's global state, on the loopback interface only."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tpserve.errors import DeadlineExceeded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo

__all__ = ["make_group"]


def make_group(path: Path, rank: int, size: int, timeout: float, join_timeout: float | None = None) -> ProcessGroupGloo:
    """Join a gloo group whose members meet through the file ``path``; returns when all have come.

    A file is good for one group, once. The last member that leaves in good order removes it.

    Args:
        path: the same for all members, in a directory that is private to this user.
        rank: this member, 0 ≤ rank < size.
        size: how many members there are.
        timeout: seconds after which an operation of the group gives up.
        join_timeout: seconds to wait for the others; as ``timeout`` if None.

    Raises:
        DeadlineExceeded: not all came.
    """
    from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

    joining = timedelta(seconds=timeout if join_timeout is None else join_timeout)
    store = FileStore(str(path), size)
    store.set_timeout(joining)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # An address and not an interface's name: torch would listen on the host name's address otherwise.
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = joining
    options._threads = 1
    try:
        group = ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise DeadlineExceeded(f"rank {rank} of {size} waited {joining} for the others at {path}: {error}") from error
    group.set_timeout(timedelta(seconds=timeout))
    return group
