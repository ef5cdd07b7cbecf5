"""The official ``openai`` client, against the real model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tpserve.bench.server import serving

pytestmark = pytest.mark.slow

QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving(["--dtype", "float32"]) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none")


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (found,) = client.models.list()
    return found.id


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > len(ANSWER.split())


def test_completion(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=6, temperature=0)
    assert answer.choices[0].text.startswith(" 5, 6")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_streamed_completion_with_a_stop_text(client: openai.OpenAI, model: str) -> None:
    stream = client.completions.create(
        model=model, prompt="1, 2, 3, 4,", max_tokens=40, temperature=0, stop=" 8", stream=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == " 5, 6, 7,"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_seed_repeats_an_answer(client: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> str:
        return (
            client.completions.create(
                model=model, prompt="My favourite colour is", max_tokens=24, temperature=1.0, seed=seed
            )
            .choices[0]
            .text
        )

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(5)}) > 1


def test_an_unknown_model_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert caught.value.param == "model"
