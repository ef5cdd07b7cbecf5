"""Compiling the CPU kernels, once for a machine, compiler and version of the source. Imports no torch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tpserve.errors import UnavailablePlugin, UserError
from tpserve.weights.cache import build_once, cache_folder, is_built

__all__ = ["built_library", "prepare", "probe"]

SOURCES = Path(__file__).parent
LIBRARY = "kernels.so"
NATIVE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
FLAGS = ("-std=c++17", "-O3", NATIVE, "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 300.0
CPU_INFO = Path("/proc/cpuinfo")


def prepare(notify: Callable[[str], None]) -> None:
    """Compile the kernels unless that has been done, and say so; a failure is for :func:`probe` to tell."""
    try:
        compiler = _compiler()
        folder = _folder(compiler)
        if not is_built(folder):
            notify(f"compiling the CPU kernels into {folder} (once, some seconds)")
            _build(compiler, folder)
    except UserError:
        return


def built_library() -> Path:
    """The compiled kernels, for ``ctypes``; compiled now if need be.

    Several processes may call this at once: one compiles, the others wait.

    Raises:
        UnavailablePlugin: there is no compiler, or it cannot compile them.
        ModelError: the cache cannot be written.
    """
    compiler = _compiler()
    folder = _folder(compiler)
    _build(compiler, folder)
    return folder / LIBRARY


def probe() -> str | None:
    """Why the kernels cannot be used here, or None."""
    try:
        ctypes.CDLL(str(built_library()))
    except UserError as error:
        return error.message
    except OSError as error:
        return f"the compiled kernels cannot be loaded: {error}"
    return None


def _compiler() -> list[str]:
    """The command: ``CXX``, or the first compiler of the usual names."""
    chosen = os.environ.get("CXX", "")
    if chosen:
        return shlex.split(chosen)
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise UnavailablePlugin("there is no C++ compiler", "Install g++, or set CXX")


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


def _build(compiler: list[str], folder: Path) -> None:
    def compile_into(partial: Path) -> None:
        _run(
            [
                *compiler,
                *FLAGS,
                *(str(path) for path in _source_files() if path.suffix == ".cpp"),
                "-o",
                str(partial / LIBRARY),
            ]
        )

    build_once(folder, compile_into, waiting=lambda: None)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailablePlugin(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), "no error was given")
        raise UnavailablePlugin(f"{command[0]} cannot compile the kernels: {complaint}")
    return done.stdout
