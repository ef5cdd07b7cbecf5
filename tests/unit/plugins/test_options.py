"""Options are described by their fields and by the docstring of their class."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tpserve.api import NoOptions, Options
from tpserve.plugins.options import OptionInfo, describe_options


class Sample(Options, frozen=True):
    """A sample.

    Attributes:
        depth: how deep,
            in layers.
        undone: says nothing more

    Notes:
        mode: not an option's text.
    """

    depth: Annotated[int, Meta(ge=1, le=9)] = 3
    undone: float | None = None
    mode: str = "x"


def test_name_type_default_and_text_of_each_field() -> None:
    assert describe_options(Sample) == [
        OptionInfo("depth", "an integer from 1 to 9", 3, "how deep, in layers."),
        OptionInfo("undone", "a number or null", None, "says nothing more"),
        OptionInfo("mode", "text", "x", ""),
    ]


def test_inherited_options_are_described_where_they_are_written() -> None:
    class More(Sample, frozen=True):
        """More of it.

        Attributes:
            undone: says more.
            height: how high.
        """

        height: int = 1

    found = {option.name: option.doc for option in describe_options(More)}
    assert found == {"depth": "how deep, in layers.", "undone": "says more.", "mode": "", "height": "how high."}


def test_nothing_to_set() -> None:
    assert describe_options(NoOptions) == []
