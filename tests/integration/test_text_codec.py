"""The front end's tokenizer and chat template against transformers', on the embedded model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tpserve.frontend.text import TextCodec
from tpserve.weights.source import resolve_model

TEXTS = [
    "",
    "The capital of France is",
    "  leading and trailing  ",
    "tabs\tand\n\nnewlines\r\n",
    "größer, naïve, Ελληνικά, русский, 日本語, 한국어, العربية",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "<|im_start|>user\nspecial tokens in a text<|im_end|>",
    "def f(x):\n    return x ** 2  # 3.14159",
    "a" * 300,
    "\x00\u200b\u2028\ufeff\ufffd",
]

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "größer 😀"}],
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "<b>&amp;</b> 'quoted' \"text\"\n"},
    ],
]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.from_folder(resolve_model("").path)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
    ],
)
def test_tokens_are_those_of_the_models_own_tokenizer(codec: TextCodec, text: str, ids: list[int]) -> None:
    """Known from elsewhere: the library of the other tests reads the same converted file."""
    assert codec.encode(text) == ids


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_model("").path)


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_a_text_are_the_same(codec: TextCodec, oracle: Any, text: str) -> None:
    tokens = codec.encode(text)
    assert tokens == oracle.encode(text)
    assert codec.decode(tokens) == oracle.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_tokens_of_a_conversation_are_the_same(codec: TextCodec, oracle: Any, messages: Any) -> None:
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert codec.encode_chat(messages) == expected


def test_any_tokens_come_out_of_a_stream_as_the_whole_text(codec: TextCodec, oracle: Any) -> None:
    draw = random.Random(0)
    for _ in range(200):
        tokens = [draw.randrange(len(oracle)) for _ in range(draw.randrange(40))]
        stream = codec.stream()
        text = "".join(stream.push(token) for token in tokens) + stream.flush()
        assert text == codec.decode(tokens) == oracle.decode(tokens, skip_special_tokens=True)
