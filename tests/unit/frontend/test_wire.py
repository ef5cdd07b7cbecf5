from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tpserve.frontend.answer import Answer
from tpserve.frontend.metrics import Meter, Metrics
from tpserve.frontend.wire import DONE, ChatFormat, CompletionFormat, Format


def events(data: bytes) -> list[Any]:
    *found, rest = data.decode().split("\n\n")
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in found if event != "data: [DONE]"]


def finished(text: str, prompt: int, cached: int) -> Answer:
    answer = Answer(1, (), asyncio.Event(), is_streaming=False, meter=Meter(Metrics()))
    answer.start(prompt, cached)
    for letter in text:
        answer.add(5, letter, None)
    answer.add(-1, "", "length")
    return answer


@pytest.mark.parametrize("text", ["plain", 'quotes " and \\', "\x00\n\u2028", "größer 😀"])
@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_every_text_survives(kind: type[Format], text: str) -> None:
    (event,) = events(kind("a model").text(3, text))
    (choice,) = event["choices"]
    assert (choice["delta"]["content"] if kind is ChatFormat else choice["text"]) == text
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (3, None, None)
    assert event["model"] == "a model"


def test_a_chat_stream_is_as_openai_has_it() -> None:
    answer = finished("ab", 7, 4)
    written = ChatFormat("m", include_usage=True)
    stream = (
        written.opening(0) + written.text(0, answer.read()) + written.finish(0, "length") + written.closing([answer])
    )
    assert stream.endswith(DONE)
    found = events(stream)
    assert [event["choices"][0]["delta"] for event in found[:3]] == [
        {"role": "assistant", "content": ""},
        {"content": "ab"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in found[:3]] == [None, None, "length"]
    assert {event["id"] for event in found} == {found[0]["id"]}
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    assert [event["usage"] for event in found[:3]] == [None] * 3
    assert found[3]["choices"] == []
    assert found[3]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_a_stream_says_nothing_of_usage_unless_asked() -> None:
    written = CompletionFormat("m")
    assert written.closing([finished("a", 1, 0)]) == DONE
    assert "usage" not in events(written.text(0, "a"))[0]


def test_whole_answers_sum_their_usage() -> None:
    body = json.loads(CompletionFormat("m").whole([finished("ab", 3, 1), finished("c", 4, 2)]))
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [
        (0, "ab", "length"),
        (1, "c", "length"),
    ]
    assert body["object"] == "text_completion"
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (7, 3)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


def test_a_whole_chat_has_a_message() -> None:
    (choice,) = json.loads(ChatFormat("m").whole([finished("ab", 3, 1)]))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ab", "refusal": None}
