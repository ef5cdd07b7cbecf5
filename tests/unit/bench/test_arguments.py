"""What programs read of their arguments."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from tpserve.bench.arguments import whole


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("7", 7), ("64", 64), ("000", 0), ("0000064", 64)])
def test_a_whole_number_of_a_range(text: str, number: int) -> None:
    assert whole(0, 64)(text) == number


@pytest.mark.parametrize("text", ["", "65", "065", "-1", "+1", "1.0", "1e1", " 1", "²", "9" * 5000])
def test_all_else_is_none(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"is not a whole number from 0 to 64$"):
        whole(0, 64)(text)
    with pytest.raises(ArgumentTypeError):
        whole(1, 64)("0")
