"""The files that a command is to write: that they can be, and that they spoil none of each other and of what is read.

Seen before any work is done for them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tpserve.config import ServeConfig
from tpserve.errors import ConfigError

__all__ = ["Named", "check_apart", "check_output", "check_outputs", "inputs", "outputs", "trace_path"]

Named = tuple[str, Path | None]
"""A file, after what it is called in an error; None: there is none."""


def outputs(config: ServeConfig, of: str = "") -> Iterator[Named]:
    """The files that ranks with these settings write; ``of`` says whose they are."""
    if config.record:
        yield f"{of}record", Path(config.record)
    if config.profile:
        for rank in range(config.tp):
            yield f"{of}profile", trace_path(Path(config.profile), rank)


def inputs(config: ServeConfig, of: str = "") -> Iterator[Named]:
    """What they read."""
    if config.model:
        with suppress(RuntimeError):  # the home of nobody: there is no such model
            yield f"{of}model", Path(config.model).expanduser()


def trace_path(folder: Path, rank: int) -> Path:
    """The trace of a rank among those of ``profile``."""
    return folder / f"rank{rank}.json"


def check_outputs(config: ServeConfig) -> None:
    """See that what ranks with these settings write can be written, without making it.

    Raises:
        ConfigError: it cannot, or would spoil something.
    """
    check_apart(outputs(config), inputs(config))
    check_output(Path(config.record) if config.record else None)
    _check_traces(config)


def check_apart(writes: Iterable[Named], reads: Iterable[Named] = ()) -> None:
    """See that each file that is written is another one, and none that is read; of a folder, its files are read.

    Raises:
        ConfigError: one would be overwritten, or is to be a folder as well.
    """
    given = [(name, path) for name, path in writes if path is not None]
    taken: dict[Hashable, str] = {}
    for name, path in given:
        file = _identity(path)
        if file in taken:
            raise ConfigError(f"{taken[file]} and {name} would both write {path}", "Give each a file of its own")
        if file is not None:
            taken[file] = name
    for name, path in given:
        for folder in path.absolute().parents:
            other = taken.get(_identity(folder))
            if other is not None:
                raise ConfigError(f"{other} would write {folder}, and {name} in it", "A file is no folder: part them")
    for name, source in reads:
        for each in [] if source is None else [source, *_files(source)]:
            other = taken.get(_identity(each))
            if other is not None:
                raise ConfigError(f"{other} would overwrite {each}, read as {name}", "Choose another file")


def _identity(path: Path) -> Hashable:
    """Equal for two paths to one file, which may not exist yet; None for what is nobody's loss, as a device or pipe."""
    try:
        found = path.stat()
    except OSError:
        return os.path.realpath(path)
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _files(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:  # no folder, or closed to us
        return []


def check_output(*paths: Path | None) -> None:
    """See that files can be written.

    Raises:
        ConfigError: one cannot.
    """
    for path in paths:
        if path is None:
            continue
        try:
            folder = path.resolve().parent
            if not folder.is_dir():
                raise ConfigError(f"{path}: there is no folder {folder}")
            if path.is_dir():
                raise ConfigError(f"{path} is a folder", "Name a file, or another place")
            if not path.exists():
                _try_out(path.resolve())
            elif not os.access(path, os.W_OK):
                raise ConfigError(f"{path} cannot be written")
        except (OSError, RuntimeError) as error:  # a name too long, a folder closed to us; links in a ring
            raise ConfigError(f"{path} cannot be written: {getattr(error, 'strerror', error)}") from None


def _try_out(path: Path) -> None:
    """Make a file and remove it: permissions do not tell whether that can be done, as in /proc."""
    path.touch(exist_ok=False)
    path.unlink()


def _check_traces(config: ServeConfig) -> None:
    """See that a folder for traces can be made and written, without making it."""
    if not config.profile:
        return
    folder = Path(config.profile)
    try:
        for path in (folder, *folder.absolute().parents):
            if path.is_symlink() and not path.exists():
                raise ConfigError(f"no traces can be written in {folder}: {path} is a link to nothing", "Remove it")
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"no traces can be written in {folder}: {error.strerror}", "Choose another folder") from None
    if folder.exists():
        check_output(*(trace_path(folder, rank) for rank in range(config.tp)))
