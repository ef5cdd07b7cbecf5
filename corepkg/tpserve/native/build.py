"""Compiling the CPU kernels, once for a machine, compiler and version of the source. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tpserve.errors import UnavailablePlugin, UserError
from tpserve.native.signatures import SYMBOLS
from tpserve.weights.cache import build_once, cache_folder, in_cache, is_built

__all__ = ["built_library", "prepare", "probe"]

SOURCES = Path(__file__).parent
LIBRARY = "kernels.so"
DIGEST = "kernels.so.sha256"
"""Written when the library has been loaded once: what does not match it is damaged."""
NATIVE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
FLAGS = ("-std=c++17", "-O3", NATIVE, "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILERS = ("c++", "g++", "clang++")
COMPILER_HINT = "Set CXX to a C++ compiler, such as g++"
FULL = "No space left on device"
FULL_HINT = "Set TPSERVE_CACHE and TMPDIR to folders of another disk, or free some space"
SECONDS = 300.0
CPU_INFO = Path("/proc/cpuinfo")

TRIAL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    ctypes.c_char.in_dll(library, name)
"""


def prepare(notify: Callable[[str], None]) -> str | None:
    """Compile the kernels unless that has been done, and say so; why it fails, or None."""
    try:
        compiler = _compiler()
        folder = _folder(compiler)
        if not is_built(folder, _is_whole):
            notify(f"compiling the CPU kernels into {folder} (once, some seconds)")
            _build(compiler, folder, _is_whole)
    except UserError as error:
        return _told(error)
    return None


def built_library() -> Path:
    """The compiled kernels, for ``ctypes``; compiled now if need be, and anew if they are damaged.

    Several processes may call this at once: one compiles, the others wait.

    Raises:
        UnavailablePlugin: there is no compiler, it cannot compile them, or what it makes cannot be loaded.
        ModelError: the cache cannot be written.
    """
    compiler = _compiler()
    folder = _folder(compiler)
    _build(compiler, folder, _is_whole)
    return folder / LIBRARY


def probe() -> str | None:
    """Why the kernels cannot be used here and what to do about it, or None."""
    try:
        compiler = _compiler()
        _build(compiler, _folder(compiler), _is_loadable)
    except UserError as error:
        return _told(error)
    return None


def _told(error: UserError) -> str:
    """What is wrong and what to do about it, in one line."""
    return f"{error.message}: {error.hint[:1].lower()}{error.hint[1:]}" if error.hint else error.message


def _compiler() -> list[str]:
    """The command: ``CXX``, or the first compiler of the usual names."""
    chosen = os.environ.get("CXX", "")
    if chosen:
        return _split(chosen)
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise UnavailablePlugin("there is no C++ compiler", "Install g++, or set CXX")


def _split(chosen: str) -> list[str]:
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise UnavailablePlugin(f"CXX is {chosen!r}: {error}", COMPILER_HINT) from None
    if not words:
        raise UnavailablePlugin(f"CXX is {chosen!r}, which names no compiler", COMPILER_HINT)
    return words


def _folder(compiler: list[str]) -> Path:
    """Where the library belongs: another place for another source, compiler, set of flags or processor."""
    digest = hashlib.sha256()
    for path in _source_files():
        digest.update(path.read_bytes())
    for text in (*compiler, _run([*compiler, "--version"]), *FLAGS, _processor()):
        digest.update(text.encode() + b"\0")
    return cache_folder() / "native" / digest.hexdigest()[:16]


def _source_files() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp"))


def _processor() -> str:
    """What Linux says of the first processor, but for what varies: its model and what instructions it has."""
    lines = [platform.machine()]
    try:
        with CPU_INFO.open() as file:
            for line in file:
                if not line.strip():
                    break
                if line.partition("\t")[0].strip() in ("model name", "flags", "Features", "CPU part"):
                    lines.append(line)
    except OSError:
        lines.append(platform.processor())
    return "".join(lines)


def _build(compiler: list[str], folder: Path, is_whole: Callable[[Path], bool]) -> None:
    def compile_into(partial: Path) -> None:
        library = partial / LIBRARY
        sources = [str(path) for path in _source_files() if path.suffix == ".cpp"]
        _run([*compiler, *FLAGS, *sources, "-o", str(library)])
        flaw = _flaw(library)
        if flaw:
            raise UnavailablePlugin(f"what {compiler[0]} compiles cannot be loaded: {flaw}", COMPILER_HINT)
        with in_cache(folder):
            (partial / DIGEST).write_text(_digest(library))

    build_once(folder, compile_into, waiting=lambda: None, is_whole=is_whole)


def _is_loadable(folder: Path) -> bool:
    """Whether a library is whole and this machine still has what it needs."""
    return _is_whole(folder) and not _flaw(folder / LIBRARY)


def _is_whole(folder: Path) -> bool:
    """Whether a library is as it was when it could be loaded."""
    try:
        return (folder / DIGEST).read_text(errors="replace") == _digest(folder / LIBRARY)
    except OSError:
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _flaw(library: Path) -> str:
    """Why a library cannot be loaded, or lacks something; empty if neither. Tried by a process that it may crash."""
    done = _finished([sys.executable, "-I", "-S", "-c", TRIAL, str(library), *SYMBOLS])
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return said[-1].partition(": ")[2] if said else f"it ends a process with exit code {done.returncode}"


def _run(command: list[str]) -> str:
    done = _finished(command)
    if done.returncode != 0:
        said = done.stderr.splitlines()
        full = next((line for line in said if FULL in line), "")
        complaint = full or next((line for line in said if "error" in line), "no error was given")
        hint = FULL_HINT if full else COMPILER_HINT
        raise UnavailablePlugin(f"{command[0]} cannot compile the kernels: {complaint}", hint)
    return done.stdout


def _finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LC_ALL": "C"}  # which keeps the messages as they are looked for
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailablePlugin(f"{command[0]} cannot be run: {error}", COMPILER_HINT) from error
