from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tpserve.errors import RequestError
from tpserve.frontend.schema import NEUTRAL, ChatRequest, CompletionRequest
from tpserve.messages import ChatPrompt, SamplingParams

MESSAGES = [{"role": "user", "content": "Hi"}]


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "Hi", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": MESSAGES, **fields})


def test_defaults_are_openais() -> None:
    assert completion().params() == SamplingParams(temperature=1.0, max_tokens=16)
    assert chat().params() == SamplingParams(temperature=1.0, max_tokens=None)


def test_every_parameter_arrives() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "max_tokens": 3,
        "stop": ["a", "b"],
        "seed": 5,
        "ignore_eos": True,
    }
    expected = SamplingParams(**{**fields, "stop": ("a", "b")})  # type: ignore[arg-type]
    assert completion(**fields).params() == expected
    assert chat(**fields).params() == expected


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 1e-9, 0.0),
        ("temperature", 2, 2.0),
        ("top_k", -1, 0),
        ("top_p", 1, 1.0),
        ("stop", "a", ("a",)),
        ("stop", [], ()),
        ("seed", -1, (1 << 63) - 1),
        ("seed", 0, 0),
    ],
)
def test_what_a_value_becomes(field: str, value: Any, expected: Any) -> None:
    assert getattr(completion(**{field: value}).params(), field) == expected


def test_null_is_the_default_for_every_optional_field() -> None:
    nulls = {name: None for name in [*CompletionRequest.model_fields, *NEUTRAL, "user"] if name != "prompt"}
    assert completion(**nulls).params() == completion().params()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NEUTRAL.items() for value in values])
def test_neutral_values_of_unsupported_fields_pass(name: str, value: Any) -> None:
    assert chat(**{name: value}).params() == chat().params()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("best_of", 3),
        ("echo", True),
        ("echo", 0),
        ("logprobs", True),
        ("logprobs", 5),
        ("logit_bias", {"1": 2}),
        ("presence_penalty", 0.5),
        ("tools", [{}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("suffix", "x"),
        ("repetition_penalty", 1.2),
        ("anything", 0),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        chat(**{name: value})
    assert (caught.value.param, caught.value.status) == (name, 400)


@pytest.mark.parametrize("name", ["user", "metadata", "store", "service_tier"])
def test_fields_about_the_client_are_ignored(name: str) -> None:
    assert completion(**{name: {"a": 1}}).params() == completion().params()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", 1 << 40),
        ("max_tokens", 1.5),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", ["x" * 1001]),
        ("stop", [1]),
        ("stop", 3),
        ("top_k", 1 << 31),
        ("stop", "\ud800"),
        ("seed", 1 << 63),
        ("seed", "1"),
        ("ignore_eos", 1),
        ("priority", 101),
        ("priority", -101),
        ("priority", 1.0),
        ("priority", "1"),
        ("priority", True),
        ("stream", "yes"),
        ("stream_options", {"other": 1}),
        ("model", 5),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", ""]),
        ("prompt", ["a", 1]),
        ("prompt", [1, "a"]),
        ("prompt", [True]),
        ("prompt", [1.0]),
        ("prompt", [-1]),
        ("prompt", [1 << 40]),
        ("prompt", [[1], "a", {}]),
        ("prompt", [[1], "a"]),
        ("prompt", ["a", [1]]),
        ("prompt", "\udc00"),
        ("prompt", {"a": 1}),
    ],
)
def test_values_that_are_wrong_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        completion(**{field: value})
    assert caught.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_come_in_four_shapes(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


def test_a_message_keeps_what_templates_may_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "c", "tool_call_id": "1"},
    ]
    assert chat(messages=messages, chat_template_kwargs={"enable_thinking": False}).prompt() == ChatPrompt(
        [
            {"role": "system", "content": "a\nb"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "c", "tool_call_id": "1"},
        ],
        {"enable_thinking": False},
    )


@pytest.mark.parametrize(
    "message",
    [
        {},
        5,
        {"role": "user", "content": 5},
        {"role": 5, "content": "x"},
        {"role": "", "content": "x"},
        {"role": "user", "content": "\ud800"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": []},
        {"role": "user", "content": "x", "name": "\ud800"},
        {"role": "user", "content": "x", "\ud800": 1},
        {"role": "user", "content": "x", "n": 1 << 64},
    ],
)
def test_messages_that_are_wrong_are_refused(message: Any) -> None:
    with pytest.raises(ValidationError):
        chat(messages=[message])


def test_only_an_assistants_message_may_be_without_content() -> None:
    with pytest.raises(RequestError, match=r"messages\[1\].content is required"):
        chat(messages=[*MESSAGES, {"role": "user"}])


def test_what_is_nested_too_deep_is_refused() -> None:
    value: Any = "x"
    for _ in range(33):
        value = [value]
    with pytest.raises(ValidationError, match="nested"):
        chat(chat_template_kwargs={"a": value})


def test_the_limit_has_two_names_in_chats() -> None:
    assert chat(max_tokens=5).limit_field == "max_tokens"
    both = chat(max_tokens=5, max_completion_tokens=7)
    assert (both.limit_field, both.params().max_tokens) == ("max_completion_tokens", 7)


def test_stream_options_need_a_stream() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    with pytest.raises(RequestError) as caught:
        completion(stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"
