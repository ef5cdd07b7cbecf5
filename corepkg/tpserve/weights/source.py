"""From what a person names as a model to a folder of it on this machine.

Loads no torch: a GGUF file is converted in a child process.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from tpserve.errors import ModelError
from tpserve.weights import default_model
from tpserve.weights.cache import content_hash, is_built, models_folder
from tpserve.weights.convert import CONVERTER_VERSION, GRACE
from tpserve.weights.files import lack_of, weight_files
from tpserve.weights.gguf import read_header
from tpserve.weights.hub import download

__all__ = ["ModelFolder", "resolve_model"]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
HINT = "Name a folder, a .gguf file or a hub id"

LONGEST = 40
"""Characters of a file's name in that of its conversion, which may have 255 bytes."""

_PATH_BEGINNINGS = ("/", "./", "../", "~", "\\")


class ModelFolder(msgspec.Struct, frozen=True):
    """A model on this machine.

    Attributes:
        path: holds config.json, safetensors files, tokenizer.json and the rest.
        name: what to call it where nobody chose a name.
    """

    path: Path
    name: str


def _say_nothing(_: str) -> None:
    pass


def resolve_model(
    model: str, load_format: str = "auto", *, notify: Callable[[str], None] = _say_nothing
) -> ModelFolder:
    """Find a model, converting or downloading it if need be.

    Args:
        model: empty for the embedded default model, a folder, a .gguf file, or an id on the Hugging Face hub.
        load_format: ``safetensors`` or ``gguf`` refuse the other, ``dummy`` needs no more of a folder than config.json.
        notify: told in one line what takes long.

    Raises:
        ModelError: there is no such model, it is incomplete, it cannot be read, or nothing can be written where
            it would be converted to.
    """
    try:
        path = Path(model).expanduser()
        is_folder, is_file, exists = path.is_dir(), path.is_file(), path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a folder closed to us; a home of nobody
        raise ModelError(f"{model} cannot be looked at: {getattr(error, 'strerror', error)}", HINT) from None
    is_gguf = not model or is_file
    if load_format == ("safetensors" if is_gguf else "gguf"):
        found = "a GGUF file" if is_gguf else "no .gguf file"
        raise ModelError(f"{model or default_model.NAME} is {found}", "--load-format auto takes what there is")
    if not model:
        return ModelFolder(_converted(default_model.locate(), notify), default_model.NAME)
    if is_folder:
        return ModelFolder(_complete(path, load_format), path.resolve().name)
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{model} is not a .gguf file", HINT)
        return ModelFolder(_converted(path, notify), path.stem)
    if exists:
        raise ModelError(f"{model} is neither a folder nor a file", HINT)
    if model.startswith(_PATH_BEGINNINGS) or model.lower().endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise ModelError(f"{model} does not exist", HINT)
    return ModelFolder(_complete(download(model, notify), load_format), model)


def _complete(folder: Path, load_format: str) -> Path:
    """Check that a folder has all that is needed to serve it."""
    is_dummy = load_format == "dummy"
    for name in ("config.json",) if is_dummy else ("config.json", "tokenizer.json"):
        lack = lack_of(folder, name)
        if lack:
            raise ModelError(lack, "A model folder needs config.json, tokenizer.json and safetensors")
    if not is_dummy:
        weight_files(folder)
    return folder.resolve()


def _converted(source: Path, notify: Callable[[str], None]) -> Path:
    """The folder that was made from a GGUF file, keyed by the file's content; made now if need be."""
    key = f"{source.stem[:LONGEST]}-{content_hash(source)[:16]}-v{CONVERTER_VERSION}"
    folder = models_folder() / key
    if not is_built(folder):
        read_header(source)
        notify(f"converting {source.name} to safetensors in {folder} (once)")
        _run_converter(source, folder, notify)
    return folder


def _run_converter(source: Path, folder: Path, notify: Callable[[str], None]) -> None:
    command = [sys.executable, "-P", "-m", "tpserve.weights.convert", "--attached", str(source), str(folder)]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                notify(line.rstrip())
            code = child.wait()
        finally:
            _end(child)
        if code != 0:
            errors.seek(0)
            last = (errors.read().strip() or f"exit code {code}").splitlines()[-1].strip()
            raise ModelError(f"{source} could not be converted: {last.removeprefix('error: ')}")


def _end(child: subprocess.Popen[str]) -> None:
    """Let a converter go, which removes what it has not ended when its standard input is closed."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    try:
        child.wait(GRACE + 1)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()
