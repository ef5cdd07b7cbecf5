"""The ``openai`` package against the front end, with a scripted rank behind it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tpserve.frontend.text import TextCodec
from tpserve.testing.fake_server import FakeServer

TEXT = "Grüße, \u2028 wörld 😀"


@pytest.fixture(scope="module")
def api(codec: TextCodec) -> Iterator[openai.OpenAI]:
    with (
        FakeServer(codec) as server,
        openai.OpenAI(base_url=f"{server.start().url}/v1", api_key="none", max_retries=0, timeout=60.0) as api,
    ):
        yield api


def test_completion(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="fake", prompt=[TEXT, "b"], max_tokens=100, temperature=0)
    assert [choice.text for choice in answer.choices] == [TEXT, "b"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion_stream(api: openai.OpenAI) -> None:
    text, reason = "", None
    for chunk in api.completions.create(model="fake", prompt=TEXT, max_tokens=100, stream=True):
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason
    assert (text, reason) == (TEXT, "stop")


def test_tokens_are_a_field_more(api: openai.OpenAI, codec: TextCodec) -> None:
    answer = api.completions.create(model="fake", prompt=TEXT, max_tokens=3, extra_body={"return_token_ids": True})
    assert answer.choices[0].to_dict()["token_ids"] == codec.encode(TEXT)[:3]


def test_chat(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": TEXT}], max_completion_tokens=100, stop=["wörld"]
    )
    (choice,) = answer.choices
    assert choice.message.content == "user\nGrüße, \u2028 "
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(api: openai.OpenAI) -> None:
    chunks = list(
        api.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": TEXT}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == f"user\n{TEXT}"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 10


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["fake"]
    assert api.models.retrieve("fake").object == "model"


def test_errors_arrive_as_what_they_are(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        api.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        api.completions.create(model="fake", prompt="x" * 500, stream=True)
    assert (wrong.value.code, wrong.value.param) == ("context_length_exceeded", "prompt")
