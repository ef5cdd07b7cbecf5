"""A plugin's options, described for people: name, type, default, and what the docstring says."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from tpserve.api.specs import Options
from tpserve.values import describe_type

__all__ = ["OptionInfo", "describe_options"]


class OptionInfo(msgspec.Struct, frozen=True):
    """One option.

    Attributes:
        name: the field's name.
        type: what it accepts, in words.
        default: its default value.
        doc: what the ``Attributes:`` section of the docstring of its class, or of one that this derives from, says of
            it; empty if nothing.
    """

    name: str
    type: str
    default: Any
    doc: str


def describe_options(options: type[Options]) -> list[OptionInfo]:
    """Describe every option, in the order of the class's fields."""
    docs: dict[str, str] = {}
    for each in reversed(options.__mro__):
        docs |= _attribute_docs(inspect.cleandoc(each.__doc__ or ""))
    defaults = options()
    return [
        OptionInfo(field.name, describe_type(field.type), getattr(defaults, field.name), docs.get(field.name, ""))
        for field in msgspec.structs.fields(options)
    ]


def _attribute_docs(docstring: str) -> dict[str, str]:
    """The texts of a Google-style ``Attributes:`` section, by name."""
    _, _, section = docstring.partition("Attributes:\n")
    docs: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        start = re.match(r" {4}(\w+): *(.*)", line)
        if start:
            name = start[1]
            docs[name] = start[2]
        elif line.startswith(" " * 8) and name:
            docs[name] = f"{docs[name]} {line.strip()}"
        elif line.strip():
            break
    return docs
