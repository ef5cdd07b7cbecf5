"""The folder where tpserve keeps what it has made once: converted models, and hashes of large files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryFile

import msgspec

from tpserve.errors import ModelError
from tpserve.values import is_text, read_json

__all__ = ["build_once", "cache_folder", "content_hash", "in_cache", "is_built", "model_files", "models_folder"]

HINT = "Set TPSERVE_CACHE to a folder that can be written, or make this one so"
FULL_HINT = "Set TPSERVE_CACHE to a folder of another disk, or free some space"


def cache_folder() -> Path:
    """``TPSERVE_CACHE``, or ``tpserve`` in the user's cache folder (``XDG_CACHE_HOME`` or ``~/.cache``).

    It may not exist.

    Raises:
        ModelError: there is no home to put it in, or its name is no text, as libraries that make files in it need it.
    """
    folder = _find_folder()
    if not is_text(str(folder)):
        raise ModelError(
            f"the cache's name {str(folder)!r} is not text in UTF-8", "Set TPSERVE_CACHE to another folder"
        )
    return folder


def models_folder() -> Path:
    """Where converted models are, a folder each."""
    return cache_folder() / "models"


@contextmanager
def model_files(folder: Path) -> Iterator[None]:
    """What is wrong with the files of a model, as an error that says how to get whole ones, if they were converted."""
    try:
        yield
    except ModelError as error:
        if not _is_converted(folder):
            raise
        again = f"Remove the folder {folder}, and the model is converted again"
        hint = f"{again}. If that is no help, the GGUF file is at fault"
        raise ModelError(error.message, hint) from error


def _is_converted(folder: Path) -> bool:
    try:
        return folder.parent.resolve() == models_folder().resolve()
    except ModelError:  # there is no cache
        return False


def _find_folder() -> Path:
    chosen = os.environ.get("TPSERVE_CACHE", "")
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        if Path(shared).is_absolute():  # the XDG specification: relative paths are to be ignored
            return Path(shared) / "tpserve"
        return Path.home() / ".cache" / "tpserve"
    except RuntimeError as error:
        raise ModelError("there is no home folder for the cache", "Set TPSERVE_CACHE to a folder") from error


def content_hash(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal; remembered in the cache as long as its size and time stay the same.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        found = path.stat()
        seen = _Seen(str(path.resolve()), found.st_size, found.st_mtime_ns)
        note = cache_folder() / "hashes" / f"{hashlib.sha256(seen.path.encode()).hexdigest()[:32]}.json"
        known = _recall(note)
        if known is not None and known.seen == seen:
            return known.sha256
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    _remember(note, _Known(seen, sha256))
    return sha256


def _is_there(target: Path) -> bool:
    return target.is_dir()


def is_built(target: Path, is_whole: Callable[[Path], bool] = _is_there) -> bool:
    """Whether a folder of the cache has been made. If not, it is seen to that it can be: making it takes a while.

    Args:
        target: the folder.
        is_whole: as for :func:`build_once`.

    Raises:
        ModelError: the cache cannot be read or written.
    """
    with in_cache(target):
        if is_whole(target):
            return True
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=target.parent):
            pass
    return False


def build_once(
    target: Path,
    build: Callable[[Path], None],
    waiting: Callable[[], None],
    is_whole: Callable[[Path], bool] = _is_there,
) -> None:
    """Make the folder ``target`` unless it is there; then nothing is written, so the cache may be read-only.

    Several processes may call this at once: one builds, the others wait for it. ``target`` appears whole or not at
    all; what a killed builder left is removed by the next one.

    Args:
        target: the folder.
        build: fills the empty folder that it is given.
        waiting: called when another process is building the same target.
        is_whole: whether the folder can be used as it is; if there is one that cannot, its files are replaced.

    Raises:
        ModelError: the cache cannot be written.
    """
    partial = target.with_name(f"{target.name}.partial")
    with in_cache(target):
        if is_whole(target):
            return
    with _locked(target, waiting):
        with in_cache(target):
            if is_whole(target):
                return
            _remove(partial)
            partial.mkdir()
        try:
            build(partial)
            with in_cache(target):
                _put(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(target: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a folder, a file that is there only meanwhile."""
    path = target.with_name(f"{target.name}.lock")
    while True:
        with in_cache(target):
            lock = _open_lock(path)
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Who held it removed its file, if not killed. What was waited for is then no lock any more: others may hold
            # the file that is there now. Only who holds that one removes it, and so before letting go.
            if not _is_at(lock, path):
                continue
            try:
                yield
            finally:
                with suppress(OSError):  # one that stays is in nobody's way
                    path.unlink()
            return


def _is_at(file: TextIOWrapper, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _put(partial: Path, target: Path) -> None:
    """Put a folder in its place. Whoever reads the files of a damaged one meanwhile finds old ones or new ones."""
    if not target.is_dir():
        _remove(target)
        partial.rename(target)
        return
    for made in partial.iterdir():
        place = target / made.name
        if place.is_dir():
            _remove(place)
        made.replace(place)


def _remove(path: Path) -> None:
    """Remove whatever is there, if something is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class _Seen(msgspec.Struct, frozen=True):
    path: str
    size: int
    mtime_ns: int


class _Known(msgspec.Struct, frozen=True):
    seen: _Seen
    sha256: str


def _recall(note: Path) -> _Known | None:
    try:
        return read_json(note.read_bytes(), _Known)
    except (OSError, msgspec.DecodeError):
        return None


def _remember(note: Path, known: _Known) -> None:
    """Keep a hash; a cache that cannot be written only costs time."""
    fresh = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(msgspec.json.encode(known))
        fresh.replace(note)
    except OSError:
        return


def _open_lock(path: Path) -> TextIOWrapper:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w")


@contextmanager
def in_cache(target: Path) -> Iterator[None]:
    """What goes wrong with the files around a folder of the cache, as an error that says so."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ModelError(
            f"cannot write the cache {target.parent}: {error.strerror or error}", FULL_HINT if is_full else HINT
        ) from error
