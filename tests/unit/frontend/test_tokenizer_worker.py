from __future__ import annotations

import math
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace

from tpserve.envelope import Opener, Sealer
from tpserve.frontend.text import TextCodec
from tpserve.frontend.tokenizer_worker import run_tokenizer
from tpserve.messages import (
    Abort,
    ChatPrompt,
    Generate,
    RankMessage,
    Rejected,
    SamplingParams,
    Shutdown,
    Tokenize,
    TokenizerMessage,
    decode_api,
    decode_rank,
    encode,
)
from tpserve.step import EngineLimits
from tpserve.testing.fake_server import LIMITS, make_pipe
from tpserve.tokens import pack_ids

PARAMS = SamplingParams(seed=1)


def tokenize(
    codec: TextCodec, *messages: TokenizerMessage, limits: EngineLimits = LIMITS
) -> tuple[list[RankMessage], list[Any]]:
    """What rank 0 and the api process get when the tokenizer gets these messages."""
    (inbox, receiver), (to_rank, rank), (to_api, api) = make_pipe(), make_pipe(), make_pipe()
    sealer = Sealer(0)
    for message in (*messages, Shutdown()):
        inbox.send(sealer.seal(encode(message)), math.inf)
    worker = Thread(target=run_tokenizer, args=(receiver, to_rank, to_api, codec, limits, 1), daemon=True)
    worker.start()
    worker.join(30)
    assert not worker.is_alive()
    from_rank, from_api = Opener(), Opener()
    return (
        [decode_rank(from_rank.open(frame)) for frame in rank.recv_many(1000, 1 << 30, 0)],
        [decode_api(from_api.open(frame)) for frame in api.recv_many(1000, 1 << 30, 0)],
    )


def test_texts_ids_and_conversations_become_tokens_in_order(codec: TextCodec) -> None:
    chat = ChatPrompt([{"role": "user", "content": "Hi"}])
    sent, refused = tokenize(
        codec,
        Tokenize(1, "Hi", PARAMS),
        Tokenize(2, [5, 6], PARAMS),
        Abort(1),
        Tokenize(3, chat, PARAMS, [7]),
    )
    assert not refused
    assert sent == [
        Generate(1, pack_ids(codec.encode("Hi")), replace(PARAMS, max_tokens=398)),
        Generate(2, pack_ids([5, 6]), replace(PARAMS, max_tokens=398)),
        Abort(1),
        Generate(3, pack_ids(codec.encode_chat(chat.messages)), replace(PARAMS, max_tokens=382), pack_ids([7])),
        Shutdown(),
    ]


def test_an_open_limit_becomes_what_the_smaller_of_context_and_pool_leaves(codec: TextCodec) -> None:
    request = Tokenize(1, [5] * 10, PARAMS)
    (by_context, _), _ = tokenize(codec, request)
    (by_pool, _), _ = tokenize(codec, request, limits=LIMITS.__class__(4, 16, 8, 400, 320, (2,)))
    assert isinstance(by_context, Generate)
    assert isinstance(by_pool, Generate)
    assert (by_context.params.max_tokens, by_pool.params.max_tokens) == (390, 54)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "pages", "param", "code"),
    [
        ([], None, 32, "prompt", None),
        ("", None, 32, "prompt", None),
        ([320], None, 32, "prompt", None),
        ([-1], None, 32, "prompt", None),
        ([5] * 400, None, 32, "prompt", "context_length_exceeded"),
        ([5] * 399, 2, 32, "max_tokens", "context_length_exceeded"),
        ([5] * 64, None, 4, "prompt", "kv_pool_exceeded"),
        ([5] * 60, 5, 4, "max_tokens", "kv_pool_exceeded"),
        (ChatPrompt([{"role": "user"}]), None, 32, "messages", None),
        (ChatPrompt([{"role": "user", "content": "x" * 400}]), None, 32, "messages", "context_length_exceeded"),
        (ChatPrompt([{"role": "user", "content": {"odd": []}}]), None, 32, "messages", None),
    ],
)
def test_refuses_what_cannot_be_served_and_names_the_field(
    codec: TextCodec, prompt: Any, max_tokens: int | None, pages: int, param: str, code: str | None
) -> None:
    limits = EngineLimits(pages, 16, 8, 400, 320, (2,))
    request = Tokenize(7, prompt, replace(PARAMS, max_tokens=max_tokens))
    sent, refused = tokenize(codec, request, Tokenize(8, "ok", PARAMS), limits=limits)
    assert [(entry.uid, entry.param, entry.code, entry.status) for entry in refused] == [(7, param, code, 400)]
    assert [message.uid for message in sent if isinstance(message, Generate)] == [8]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "pages"), [([5] * 399, 1, 32), ([5] * 399, None, 32), ([5] * 60, 4, 4)]
)
def test_takes_what_just_fits(codec: TextCodec, prompt: list[int], max_tokens: int | None, pages: int) -> None:
    limits = EngineLimits(pages, 16, 8, 400, 320, (2,))
    sent, refused = tokenize(codec, Tokenize(7, prompt, replace(PARAMS, max_tokens=max_tokens)), limits=limits)
    assert not refused
    assert len(sent) == 2


class PanicError(BaseException):
    """What a panic in Rust looks like: no Exception."""


class Panicking(TextCodec):
    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        raise PanicError("index out of bounds")


@pytest.mark.parametrize("prompt", ["x" * 4000, ChatPrompt([{"role": "user", "content": "x" * 4000}])])
def test_does_not_tokenize_what_cannot_fit(folder: Any, prompt: Any) -> None:
    _, refused = tokenize(Panicking.from_folder(folder), Tokenize(1, prompt, PARAMS))
    assert refused[0].code == "context_length_exceeded"
    assert "at least " in refused[0].message


def test_survives_a_panic_of_the_tokenizer_and_logs_it(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    sent, refused = tokenize(Panicking.from_folder(folder), Tokenize(1, "x", PARAMS), Tokenize(2, [5], PARAMS))
    assert [entry.uid for entry in refused] == [1]
    assert isinstance(refused[0], Rejected)
    assert [message.uid for message in sent if isinstance(message, Generate)] == [2]
    assert "index out of bounds" in caplog.text
