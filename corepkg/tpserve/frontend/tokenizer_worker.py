"""The tokenizer process: requests in text become requests in tokens, or are refused."""

from __future__ import annotations

import logging
import math

from msgspec.structs import replace

from tpserve.api import PipeReceiver, PipeSender
from tpserve.envelope import Opener, Sealer
from tpserve.errors import RequestError
from tpserve.frontend.fit import fit
from tpserve.frontend.prompt import encode_prompt
from tpserve.frontend.text import TextCodec
from tpserve.messages import (
    ChatPrompt,
    Generate,
    RankMessage,
    Rejected,
    Shutdown,
    Tokenize,
    TokenizerMessage,
    decode_tokenizer,
    encode,
)
from tpserve.step import EngineLimits
from tpserve.tokens import pack_ids

__all__ = ["run_tokenizer"]

MAX_FRAMES = 64
MAX_BYTES = 16 << 20

logger = logging.getLogger(__name__)


def run_tokenizer(
    receiver: PipeReceiver,
    to_rank: PipeSender,
    to_api: PipeSender,
    codec: TextCodec,
    limits: EngineLimits,
    producer: int,
) -> None:
    """Turn requests into tokens until a Shutdown comes, which goes on to rank 0.

    Args:
        receiver: where the api process's messages come from.
        to_rank: connected pipe to rank 0.
        to_api: connected pipe to the api process, for refusals.
        codec: the model's tokenizer.
        limits: what a request must fit into.
        producer: this process's number in envelopes.

    Raises:
        TransportError: a link failed, or a frame is damaged or missing.
    """
    worker = _Worker(to_rank, to_api, codec, limits, producer)
    opener = Opener()
    while True:
        for frame in receiver.recv_many(MAX_FRAMES, MAX_BYTES, math.inf):
            message = decode_tokenizer(opener.open(frame))
            worker.handle(message)
            if isinstance(message, Shutdown):
                return


class _Worker:
    """Handles one message at a time."""

    def __init__(
        self, to_rank: PipeSender, to_api: PipeSender, codec: TextCodec, limits: EngineLimits, producer: int
    ) -> None:
        self._to_rank = to_rank
        self._to_api = to_api
        self._rank_sealer = Sealer(producer)
        self._api_sealer = Sealer(producer)
        self._codec = codec
        self._limits = limits

    def handle(self, message: TokenizerMessage) -> None:
        """Pass a message on to rank 0, a request in tokens, or refuse it."""
        if not isinstance(message, Tokenize):
            self._forward(message)
            return
        try:
            request = self._tokenize(message)
        except RequestError as error:
            self._reject(message, error)
        except BaseException as error:  # a panic of the tokenizer's Rust code is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            logger.exception("request %#x could not be tokenized", message.uid)
            self._reject(message, RequestError(f"this could not be turned into tokens: {error}", _field(message)))
        else:
            self._forward(request)

    def _tokenize(self, message: Tokenize) -> Generate:
        prompt, field = message.prompt, _field(message)
        tokens = prompt if isinstance(prompt, list) else encode_prompt(self._codec, prompt, self._limits, field)
        max_tokens = fit(tokens, message.params.max_tokens, self._limits, field)
        params = replace(message.params, max_tokens=max_tokens)
        return Generate(message.uid, pack_ids(tokens), params, pack_ids(message.output_ids), message.priority)

    def _forward(self, message: RankMessage) -> None:
        self._to_rank.send(self._rank_sealer.seal(encode(message)), math.inf)

    def _reject(self, message: Tokenize, error: RequestError) -> None:
        rejected = Rejected(message.uid, error.message, error.param, error.code, error.status)
        self._to_api.send(self._api_sealer.seal(encode(rejected)), math.inf)


def _field(message: Tokenize) -> str:
    return "messages" if isinstance(message.prompt, ChatPrompt) else "prompt"
