"""Turning what people write (flags, environment variables, YAML) into typed values, with errors that help."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

__all__ = [
    "TOO_DEEP",
    "brief",
    "closest",
    "convert",
    "describe_type",
    "did_you_mean",
    "is_text",
    "read_json",
    "read_yaml",
    "to_json",
]

T = TypeVar("T")

TOO_DEEP = "nested too deep"

_SURROGATE = re.compile("[\ud800-\udfff]")


def convert(value: Any, type_: Any) -> Any:
    """Convert a value to a type, reading text as the type's literals; text for a list or mapping is read as YAML.

    Numbers are finite: others cannot be written in JSON, as which the values reach other processes.

    Raises:
        ValueError: it does not fit; the message says what was expected and what was found.
    """
    for candidate in (value, _parse_yaml(value)):
        try:
            result = msgspec.convert(candidate, type_, strict=False)
        except msgspec.ValidationError:
            continue
        if not (isinstance(result, float) and not math.isfinite(result)):
            return result
    raise ValueError(f"expected {describe_type(type_)}, found {value!r}")


def read_json(content: bytes, type_: type[T]) -> T:
    """Read JSON that others have written, as a type.

    Raises:
        DecodeError: it is not JSON, not of the type (a ValidationError), or nested too deep, of which msgspec's own
            decoder tells in another way.
    """
    try:
        return msgspec.json.decode(content, type=type_)
    except RecursionError:
        raise msgspec.DecodeError(TOO_DEEP) from None


def read_yaml(text: str) -> Any:
    """Read a YAML document; a mapping that has a key twice is refused, for only one of the two would count.

    Raises:
        ValueError: it cannot be read; the message is one line.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            twice = [key for key in keys if keys.count(key) > 1]
            if twice:
                raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} is there twice", node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506 - it is a safe one
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except (yaml.YAMLError, ValueError) as error:  # of dates that do not exist, and numbers that are too long
        raise ValueError(" ".join(str(error).split())) from None


def brief(text: str, most: int = 80) -> str:
    """A name out of a file, as an error shows it: what cannot be printed escaped, as in repr, and cut if it is long."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def is_text(text: str) -> bool:
    """Whether it can be written: names of files and variables may hold bytes that are no UTF-8."""
    return _SURROGATE.search(text) is None


def to_json(value: Any) -> bytes:
    """Write a value as JSON: paths and the like as text, and what is no text (:func:`is_text`) escaped, as in repr."""
    try:
        return msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value, enc_hook=str), ensure_ascii=False)
        return _SURROGATE.sub(lambda found: rf"\\u{ord(found[0]):x}", text).encode()


def describe_type(type_: Any) -> str:
    """Say in words what a type accepts: ``an integer from 1 to 256``."""
    return _describe(inspect.type_info(type_))


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, if any comes near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)), None)


def did_you_mean(word: str, known: Iterable[str], *, what: str = "Known") -> str:
    """A hint for a word that is not known: the one that was probably meant, and all that are unless they are many."""
    names = list(known)
    close = closest(word, names)
    listed = f"{what}: {', '.join(names) or 'none'}"
    if close is None:
        return listed
    return f"Did you mean {close!r}? {listed}" if len(names) <= 12 else f"Did you mean {close!r}?"


def _parse_yaml(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return read_yaml(value)
    except ValueError:
        return value


def _describe(info: inspect.Type) -> str:
    match info:
        case inspect.IntType():
            return "an integer" + _range(info)
        case inspect.FloatType():
            return "a number" + _range(info)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.NoneType():
            return "null"
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in info.values)
        case inspect.UnionType():
            return " or ".join(_describe(member) for member in info.types)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return f"a list (each {_describe(info.item_type)})"
        case inspect.DictType():
            return "a mapping"
        case inspect.Metadata():
            return _describe(info.type)
        case inspect.CustomType():
            return f"a {info.cls.__name__}"
        case _:
            return type(info).__name__.removesuffix("Type").lower()


def _range(info: inspect.IntType | inspect.FloatType) -> str:
    bounds = [
        f"{word} {bound}"
        for word, bound in (("above", info.gt), ("from", info.ge), ("below", info.lt), ("to", info.le))
        if bound is not None
    ]
    text = " " + " ".join(bounds) if bounds else ""
    return text.replace(" from", " of at least") if info.ge is not None and info.le is None else text
