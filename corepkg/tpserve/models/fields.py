"""Reading the keys of a model's JSON files with errors that name the file and the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from tpserve.errors import ModelError
from tpserve.values import read_json

__all__ = ["MOST", "Fields"]

MOST = (1 << 31) - 1
"""Of nothing does a model have more; what is larger would only fail later."""


class Fields:
    """The keys of one JSON file, read with checked types; errors name the file and the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @staticmethod
    def of(path: Path) -> Fields:
        """Read a file.

        Raises:
            ModelError: it is missing, unreadable, or not a JSON object.
        """
        return Fields(path, _read_json(path))

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default`` where it is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, *, most: int = MOST) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(key, f"a positive integer up to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def ids(self, key: str) -> list[int]:
        """Token ids: an integer, a list of them, or nothing."""
        value = self.get(key, [])
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in found):
            raise self.wrong(key, "a token id or a list of them")
        return found

    def section(self, key: str) -> Fields:
        """A nested object; empty where it is absent or null."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(self.path, value)

    def wrong(self, key: str, expected: str) -> ModelError:
        """The error for a key that has not the value it should."""
        if self.values.get(key) is None:
            return ModelError(f"{self.path} lacks {key!r}")
        return ModelError(f"{self.path}: {key!r} must be {expected}, found {self.values[key]!r}")

    def unsupported(self, key: str, supported: str) -> ModelError:
        """The error for a value that is right and not implemented."""
        return ModelError(f"{self.path}: {key!r} = {self.get(key)!r} is not supported", f"Supported: {supported}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path.read_bytes(), object)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
