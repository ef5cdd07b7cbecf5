"""Writing a new plugin package from the templates in ``templates/``: those that all kinds share, and the kind's own.

A template is a file with ``$words`` in it; the folder ``src/package`` gets the package's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from tpserve.errors import ConfigError
from tpserve.plugins.discovery import NAME, RESERVED, Entry
from tpserve.plugins.registry import INTERFACES
from tpserve.settings import kind_flag
from tpserve.values import did_you_mean

__all__ = ["LONGEST_NAME", "distribution_name", "taken_by", "template_kinds", "usage", "write_package"]

LONGEST_NAME = 24

SUFFIX = ".tmpl"


def template_kinds() -> list[str]:
    """The kinds that have a template."""
    return sorted(folder.name for folder in _templates().iterdir() if folder.is_dir() and folder.name != "shared")


def distribution_name(kind: str, name: str) -> str:
    """What the package of a plugin is called."""
    return f"tpserve-{kind}-{name}".replace("_", "-")


def write_package(kind: str, name: str, folder: Path) -> list[Path]:
    """Write a complete package: a small implementation that works, its contract test, and what pip needs.

    Args:
        kind: one that has a template.
        name: of the plugin.
        folder: where to; made if needed.

    Returns:
        The files written, in order.

    Raises:
        ConfigError: there is no such template, the name cannot be one, or the folder is in use or cannot be written.
    """
    if kind not in template_kinds():
        raise ConfigError(
            f"there is no template for a kind {kind!r}", did_you_mean(kind, template_kinds(), what="Kinds")
        )
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        hint = f"A name is up to {LONGEST_NAME} lower-case letters, digits and single _, a letter first: my_{kind}"
        raise ConfigError(f"{name!r} cannot be a plugin's name", hint)
    if name in RESERVED:
        raise ConfigError(f"{name!r} cannot be a plugin's name", "Flags give it another meaning")
    words = _words(kind, name)
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty", "Choose another with --dir")
        files = {folder / path: text for part in ("shared", kind) for path, text in _rendered(part, words)}
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", "Choose another with --dir") from error
    return sorted(files)


def taken_by(entries: list[Entry], kind: str, name: str) -> str | None:
    """Which other distribution that is installed has a plugin of this kind and name; pip replaces the new one's own."""
    own = distribution_name(kind, name)
    owners = (e for e in entries if (e.kind, e.name) == (kind, name) and _normal(e.distribution) != own)
    return next((f"{e.distribution} {e.version}" for e in owners), None)


def usage(kind: str, name: str) -> str:
    """The flags of ``tpserve launch`` with which a new plugin has something to do."""
    return f"{kind_flag(kind)} {name}" + (" --tp 2" if kind in ("transport", "sync", "comm") else "")


def _normal(distribution: str) -> str:
    """A distribution's name as an index and pip compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _words(kind: str, name: str) -> dict[str, str]:
    interface = INTERFACES[kind].__name__
    camel = "".join(part.capitalize() for part in name.split("_"))
    return {
        "kind": kind,
        "name": name,
        "Name": camel,
        "cls": camel + interface,
        "interface": interface,
        "package": f"tpserve_{kind}_{name}",
        "distribution": distribution_name(kind, name),
        "usage": usage(kind, name),
    }


def _templates() -> Traversable:
    return resources.files("tpserve.plugins") / "templates"


def _rendered(part: str, words: dict[str, str]) -> Iterator[tuple[Path, str]]:
    """The files of one folder of templates: their path in the package, and their text."""
    for path, source in _walk(_templates() / part, Path()):
        place = re.sub("^src/package/", f"src/{words['package']}/", path.as_posix())
        text = source.read_text(encoding="utf-8")
        yield Path(place.removesuffix(SUFFIX)), Template(text).substitute(words) if place.endswith(SUFFIX) else text


def _walk(folder: Traversable, path: Path) -> Iterator[tuple[Path, Traversable]]:
    for child in folder.iterdir():
        if child.is_dir():
            yield from _walk(child, path / child.name)
        else:
            yield path / child.name, child
