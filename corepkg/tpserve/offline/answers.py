"""What comes back for one prompt, from its first token to its finish."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tpserve.frontend.detokenize import StreamDecoder
from tpserve.frontend.stops import StopMatcher
from tpserve.messages import FinishReason

__all__ = ["Answer", "Completion"]


class Completion(msgspec.Struct, frozen=True):
    """What became of one prompt.

    Attributes:
        index: the prompt's place among those given.
        text: the output, without special tokens, up to a stop string.
        token_ids: the output's tokens: those that completed a stop string, and an end-of-text token, included.
        finish_reason: ``stop`` at an end-of-text token or a stop string, ``length`` at a limit.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of these were found in the prefix cache.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int


class Answer:
    """One prompt's output as it grows.

    Args:
        index: the prompt's place among those given.
        prompt_tokens: length of the prompt.
        decoder: turns its tokens into text.
        stop: texts that end it.

    Attributes:
        completion: the whole, once it has finished; None before.
        cached_tokens: how much of the prompt was found in the prefix cache.
    """

    def __init__(self, index: int, prompt_tokens: int, decoder: StreamDecoder, stop: Sequence[str]) -> None:
        self.completion: Completion | None = None
        self.cached_tokens = 0
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._decoder = decoder
        self._stops = StopMatcher(stop)
        self._texts: list[str] = []
        self._tokens: list[int] = []

    def add(self, token: int, finish: FinishReason | None) -> bool:
        """Take a token (-1: none) and why the rank finished; whether a stop string ended it before the rank did."""
        text = ""
        if token >= 0:
            self._tokens.append(token)
            # A rank stops at an end-of-text token only, which is no part of the text.
            text = self._decoder.push(token) if finish != "stop" else ""
        if finish:
            text += self._decoder.flush()
        text, stopped = self._stops.push(text)
        self._texts.append(text)
        if stopped:
            self._complete("stop")
        elif finish:
            self._texts.append(self._stops.flush())
            self._complete(finish)
        return stopped and not finish

    def _complete(self, reason: FinishReason) -> None:
        text = "".join(self._texts)
        self.completion = Completion(self._index, text, self._tokens, reason, self._prompt_tokens, self.cached_tokens)
