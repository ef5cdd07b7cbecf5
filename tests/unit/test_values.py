"""Values that people write are converted, or refused in words they know."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from tpserve.errors import ConfigError
from tpserve.values import brief, closest, convert, describe_type, did_you_mean, read_json, read_yaml, to_json


@pytest.mark.parametrize(
    ("value", "type_", "expected"),
    [
        ("12", int, 12),
        ("0.5", float, 0.5),
        ("yes", bool, True),
        ("off", bool, False),
        ("12", str, "12"),
        ("null", int | None, None),
        ("[1, 2]", list[int], [1, 2]),
        ("{a: 1}", dict[str, int], {"a": 1}),
        (3, float, 3.0),
    ],
)
def test_text_becomes_the_type(value: Any, type_: Any, expected: Any) -> None:
    found = convert(value, type_)

    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "type_", "says"),
    [
        ("x", int, "expected an integer, found 'x'"),
        ("300", Annotated[int, Meta(ge=1, le=256)], "expected an integer from 1 to 256, found '300'"),
        ("nan", float, "expected a number, found 'nan'"),
        (math.inf, float, "expected a number, found inf"),
        ("[", list[int], r"expected a list \(each an integer\), found '\['"),
        (5, str, "expected text, found 5"),
        ("c", Literal["a", "b"], "expected one of a, b, found 'c'"),
    ],
)
def test_what_does_not_fit_is_said(value: Any, type_: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        convert(value, type_)


@pytest.mark.parametrize(
    ("type_", "words"),
    [
        (Annotated[int, Meta(ge=0)], "an integer of at least 0"),
        (Annotated[float, Meta(gt=0, le=1)], "a number above 0 to 1"),
        (Annotated[float, Meta(gt=0)], "a number above 0"),
        (int | None, "an integer or null"),
        (tuple[str, ...], "a list (each text)"),
        (dict[str, int], "a mapping"),
        (bool, "true or false"),
    ],
)
def test_types_in_words(type_: Any, words: str) -> None:
    assert describe_type(type_) == words


def test_json_escapes_what_is_no_text() -> None:
    odd = {"path": Path("a\udcff"), "é\ud800": ["\U0001f600", "\\udcff"]}
    assert to_json(odd) == r'{"path": "a\\udcff", "é\\ud800": ["😀", "\\udcff"]}'.encode()
    assert to_json({"path": Path("é")}) == '{"path":"é"}'.encode()


def test_hints_name_what_was_meant_and_what_there_is() -> None:
    assert did_you_mean("polcy", ["policy", "sync"]) == "Did you mean 'policy'? Known: policy, sync"
    assert did_you_mean("zzz", ["policy"], what="Kinds") == "Kinds: policy"
    assert did_you_mean("x", []) == "Known: none"
    assert did_you_mean("word01", [f"word{i}" for i in range(20)]).count("word") == 1
    assert closest("zzz", ["policy"]) is None


def test_what_is_nested_too_deep_is_told_as_any_other_mistake() -> None:
    deep = 5000 * "[" + 5000 * "]"
    with pytest.raises(msgspec.DecodeError, match=r"^nested too deep$"):
        read_json(deep.encode(), object)
    with pytest.raises(msgspec.DecodeError, match=r"^nested too deep$"):
        read_json(b'{"more": %s}' % deep.encode(), msgspec.defstruct("Some", []))
    with pytest.raises(ValueError, match=r"^nested too deep$"):
        read_yaml(deep)
    with pytest.raises(msgspec.ValidationError):
        read_json(b"1", str)
    assert read_json(b"[1]", list[int]) == [1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("blk.0.attn_q.weight", "blk.0.attn_q.weight"),
        ("größer 'so'", "größer 'so'"),
        ("a\nb\x1b[31m\x00\u2028\udcff", r"a\nb\x1b[31m\x00\u2028\udcff"),
        ("x" * 80, "x" * 80),
        ("x" * 81, "x" * 79 + "…"),
        ("\n" * 50, r"\n" * 39 + r"\…"),
    ],
)
def test_a_name_out_of_a_file_is_short_and_in_one_line(text: str, shown: str) -> None:
    assert brief(text) == shown


def test_an_error_for_a_user_is_one_line_whatever_it_names() -> None:
    error = ConfigError("a\nerror: b\x1b[31m", "c\r\u2028d\te")
    assert str(error) == r"a\nerror: b\x1b[31m. c\r\u2028d\te"
