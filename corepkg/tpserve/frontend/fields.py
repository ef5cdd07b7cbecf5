"""Types of request fields, beyond what pydantic has."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

__all__ = ["MAX_STOP_LENGTH", "MAX_STOPS", "PlainObject", "Prompts", "Stops", "Text", "check_plain", "encodable"]

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_DEPTH = 32


def encodable(text: str) -> str:
    """Check that a text can be written in UTF-8, and return it.

    Raises:
        PydanticCustomError: it has half a surrogate pair, which JSON can write and which is no character.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "the text has a lone surrogate, which is no character") from None
    return text


def check_plain(value: Any) -> Any:
    """Check that a JSON value can be passed on between processes, and return it.

    Raises:
        PydanticCustomError: it is nested too deep, or a text or an integer in it cannot be passed on.
    """
    _check_plain(value, 0)
    return value


def _check_plain(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise PydanticCustomError("depth", "nested more than {limit} levels deep", {"limit": MAX_DEPTH})
    if isinstance(value, str):
        encodable(value)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise PydanticCustomError("integer", "integers must fit into 64 bits")
    elif isinstance(value, dict):
        for key, item in value.items():
            encodable(key)
            _check_plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth + 1)


def _as_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """Each prompt, a text or token ids, of the four shapes that OpenAI's API takes."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise PydanticCustomError("prompt", "must not be empty")
    if items is value and all(type(item) is int for item in items):
        items = [items]
    is_text = isinstance(items[0], str)
    for item in items:
        if is_text and isinstance(item, str):
            encodable(item)
        elif is_text or not isinstance(item, list) or not all(type(token) is int for token in item):
            raise PydanticCustomError(
                "prompt", "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
            )
        elif not all(0 <= token < 1 << 31 for token in item):
            raise PydanticCustomError("prompt", "token ids must be from 0 to the size of the vocabulary")
        if not item:
            raise PydanticCustomError("prompt", "must not be empty")
    return items


Text = Annotated[str, AfterValidator(encodable)]
"""A string that can be written in UTF-8."""

PlainObject = Annotated[dict[str, Any], AfterValidator(check_plain)]
"""Any JSON object of limited depth whose texts and integers can be passed on."""

Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(encodable)]],
    BeforeValidator(_as_list),
    Field(max_length=MAX_STOPS),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""A string or a list of strings; always a list afterwards."""

Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
"""One prompt or several, as texts or token ids; always a list of prompts afterwards."""
