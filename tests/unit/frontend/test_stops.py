from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpserve.frontend.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out += text
        if stopped:
            return out, True
    return out + matcher.flush(), False


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END"], ["abc", "E", "N", "D", "x"], ("abc", True)),
        (["END"], ["abcE", "Nd"], ("abcENd", False)),
        (["aab"], ["aa", "ab"], ("a", True)),
        (["abcd", "bc"], ["ab", "cd"], ("a", True)),
        (["bc", "abc"], ["xabc"], ("x", True)),
        (["\n\n"], ["a\n", "b\n", "\nc"], ("a\nb", True)),
        (["ß", "é"], ["caf", "é!"], ("caf", True)),
        ([], ["a", "b"], ("ab", False)),
    ],
)
def test_cuts_where_the_first_match_is_complete(
    stops: list[str], pieces: list[str], expected: tuple[str, bool]
) -> None:
    assert run(stops, pieces) == expected


def test_holds_back_no_more_than_may_become_a_match() -> None:
    matcher = StopMatcher(["xyz"])
    assert matcher.push("ab") == ("ab", False)
    assert matcher.push("xy") == ("", False)
    assert matcher.push("x") == ("xy", False)
    assert matcher.flush() == "x"


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == reference(stops, "".join(pieces))
