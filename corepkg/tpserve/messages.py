"""What the processes say to each other, as msgpack structs. Nothing here is ever unpickled.

What ranks decode cannot refer to itself, so the garbage collector need not know it: that saves a quarter of decoding.

api ──TokenizerMessage──► tokenizer ──RankMessage──► rank 0 ──StepOutput──► detokenizer ──ApiMessage──► api
                              └───────────────────ApiMessage (Rejected)────────────────────────────────►┘
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "GREEDY_BELOW",
    "MAX_COUNT",
    "MAX_PRIORITY",
    "Abort",
    "ApiMessage",
    "ChatPrompt",
    "FinishReason",
    "Generate",
    "MaxTokens",
    "PoolReport",
    "RankMessage",
    "Rejected",
    "SamplingParams",
    "Shutdown",
    "Started",
    "StepOutput",
    "Temperature",
    "TextOutput",
    "Tokenize",
    "TokenizerMessage",
    "decode_api",
    "decode_rank",
    "decode_ranks",
    "decode_step",
    "decode_tokenizer",
    "encode",
]

FinishReason = Literal["stop", "length", "abort", "error"]

GREEDY_BELOW = 1e-4
"""A lower temperature picks the likeliest token anyway, and would overflow the logits on the way."""


MAX_PRIORITY = 100
"""Priorities go from minus this to this; larger is more urgent."""


MAX_COUNT = (1 << 31) - 1
"""Of tokens: what engines count them by has 32 bits."""

Temperature = Annotated[float, Meta(ge=0, le=2)]
MaxTokens = Annotated[int, Meta(ge=1, le=MAX_COUNT)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How one request is continued. The ranges are checked where one is decoded or converted.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens with at least this much probability; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.
        min_p: keep tokens at least this likely relative to the most likely; 0 keeps all.
        max_tokens: most tokens to generate; None: as many as the context has room for.
        stop: texts that end the output, themselves left out.
        seed: of the sampling counter; None: the server draws one.
        ignore_eos: go on past the end-of-text token.
    """

    temperature: Temperature = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_tokens: MaxTokens | None = None
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    ignore_eos: bool = False


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat"):
    """A conversation, to be written out with the model's chat template.

    Attributes:
        messages: OpenAI's message objects: role, content and whatever else the template reads.
        template_args: further variables of the template.
        time: what the template takes for now, in seconds since 1970; None: the moment when it is rendered.
    """

    messages: list[dict[str, Any]]
    template_args: dict[str, Any] = {}
    time: float | None = None


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """api → tokenizer: a new request.

    Attributes:
        uid: the request's identity, given by the api process.
        prompt: text, token ids, or a conversation, whose ``time`` is set.
        params: sampling parameters; ``seed`` is set.
        output_ids: tokens generated before, for a request that is resumed.
        priority: as in Generate.
    """

    uid: int
    prompt: str | list[int] | ChatPrompt
    params: SamplingParams
    output_ids: list[int] = []
    priority: int = 0


class Generate(msgspec.Struct, frozen=True, tag="generate", omit_defaults=True, gc=False):
    """tokenizer → ranks: a request in tokens.

    Attributes:
        uid: the request's identity.
        prompt_ids: the prompt's tokens, written by :func:`tpserve.tokens.pack_ids`.
        params: sampling parameters; ``max_tokens`` and ``seed`` are set.
        output_ids: tokens generated before, for a request that is resumed; written likewise.
        priority: larger is more urgent; the policy ``priority`` looks at it. Within MAX_PRIORITY of 0.
    """

    uid: int
    prompt_ids: bytes
    params: SamplingParams
    output_ids: bytes = b""
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort", gc=False):
    """api → tokenizer → ranks: the client has gone, or has all it wanted. Follows its request's way."""

    uid: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop after this round: every process that gets it passes it on and leaves with exit code 0."""


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request has been admitted; comes with or before its first token.

    Attributes:
        uid: the request.
        prompt_tokens: length of its prompt.
        cached_tokens: how many of these were found in the prefix cache.
        output_ids: tokens generated before, for a request that is resumed: text goes on behind them.
    """

    uid: int
    prompt_tokens: int
    cached_tokens: int
    output_ids: list[int] = []


class PoolReport(msgspec.Struct, frozen=True, array_like=True):
    """What has happened to the KV pool since the report before.

    Attributes:
        retractions: how often a running request had to give its pages up.
        looked_up: tokens of the requests that were admitted, also of those that were again.
        found: how many of these were cached.
        evicted: cached pages that were given up for others.
        usage: the share of the pool that running requests hold now, 0 … 1.
    """

    retractions: int
    looked_up: int
    found: int
    evicted: int
    usage: float


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """rank 0 → detokenizer: all that one round produced, in batch order.

    Attributes:
        round: the round's number.
        uids: the requests that got a token or finished.
        tokens: the new token of each; -1 for one that finished without.
        finished: why each finished; None where it goes on.
        started: requests admitted since the last output.
        pool: news of the KV pool, if there are any.
    """

    round: int
    uids: list[int]
    tokens: list[int]
    finished: list[FinishReason | None]
    started: list[Started] = []
    pool: PoolReport | None = None


class TextOutput(msgspec.Struct, frozen=True, tag="text"):
    """detokenizer → api: a round's output as text.

    Attributes:
        uids, tokens, finished, started, pool: as in StepOutput.
        texts: what each new token adds to its request's text; may be empty while a character is incomplete.
    """

    uids: list[int]
    tokens: list[int]
    texts: list[str]
    finished: list[FinishReason | None]
    started: list[Started] = []
    pool: PoolReport | None = None


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """tokenizer → api: a request that cannot be served; the fields of a RequestError."""

    uid: int
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400


TokenizerMessage = Tokenize | Abort | Shutdown
RankMessage = Generate | Abort | Shutdown
StepMessage = StepOutput | Shutdown
ApiMessage = TextOutput | Rejected | Shutdown

_encoder = msgspec.msgpack.Encoder()
_tokenizer = msgspec.msgpack.Decoder(TokenizerMessage)
_rank = msgspec.msgpack.Decoder(RankMessage)
_step = msgspec.msgpack.Decoder(StepMessage)
_api = msgspec.msgpack.Decoder(ApiMessage)


def encode(message: TokenizerMessage | RankMessage | StepMessage | ApiMessage) -> bytes:
    """Write any message as msgpack."""
    return _encoder.encode(message)


def decode_tokenizer(payload: bytes | memoryview) -> TokenizerMessage:
    """Read what a tokenizer gets."""
    return _tokenizer.decode(payload)


def decode_rank(payload: bytes | memoryview) -> RankMessage:
    """Read what a rank gets."""
    return _rank.decode(payload)


def decode_ranks(payloads: Iterable[bytes | memoryview]) -> list[RankMessage]:
    """Read several of them."""
    decode = _rank.decode
    return [decode(payload) for payload in payloads]


def decode_step(payload: bytes | memoryview) -> StepMessage:
    """Read what a detokenizer gets."""
    return _step.decode(payload)


def decode_api(payload: bytes | memoryview) -> ApiMessage:
    """Read what the api process gets."""
    return _api.decode(payload)
