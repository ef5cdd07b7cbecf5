from __future__ import annotations

import re
from typing import Any

import pytest

from tpserve.errors import ModelError, RequestError
from tpserve.frontend.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **args: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, args)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hi"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\nend", "user\nend"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aHib"),
        ("{{ messages[0]['content'] | trim }}{{ 'x'.upper() }}", "HiX"),
    ],
)
def test_has_what_templates_expect(source: str, expected: str) -> None:
    assert render(source) == expected


def test_knows_the_date() -> None:
    assert re.fullmatch(r"\d\d [A-Z]\w+ 20\d\d", render("{{ strftime_now('%d %b %Y') }}"))
    assert ChatTemplate("{{ strftime_now('%s') }}", {}).render(USER, {}, 1234567890.0) == "1234567890"


def test_takes_further_variables_which_win_over_the_usual_ones() -> None:
    assert render("{{ a }}{{ add_generation_prompt }}", a=1, add_generation_prompt=False) == "1False"


def test_cannot_be_given_another_conversation() -> None:
    args = {"messages": [{"role": "user", "content": "other"}]}
    assert ChatTemplate("{{ messages[0].content }}", {}).render(USER, args) == "Hi"


def test_fields_that_are_none_are_not_there() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None}
    assert render("{{ 'content' in messages[0] }}{{ messages[0].tool_calls is defined }}", [message]) == "FalseFalse"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + messages[0].nothing }}", "no attribute 'nothing'"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages[5].content }}", "object"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_what_a_template_refuses_is_a_request_error_with_its_words(source: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_is_not_jinja_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="line 2 of the model's chat template"):
        ChatTemplate("a\n{% if %}", {})
