"""What goes out: bodies and stream events in OpenAI's format, as bytes.

An event is joined from parts that are built once for its stream, so a token costs the JSON of its text.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from tpserve.frontend.answer import Answer
from tpserve.messages import FinishReason

__all__ = ["DONE", "ChatFormat", "CompletionFormat", "Format", "event"]

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


def event(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % body


class Format(ABC):
    """Writes the answers to one HTTP request.

    Args:
        model: the name that the client used.
        include_usage: whether a stream ends with the token counts; its other events then say that they have none.
        with_tokens: whether choices carry the output's tokens; in streams, each event the tokens that it brings.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, include_usage: bool = False, with_tokens: bool = False) -> None:
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._with_tokens = with_tokens
        opening = _json({**self._head, "object": self.chunk_object})[:-1]
        self._before = b"data: " + opening + b',"choices":[{"index":'
        self._after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def opening(self, index: int) -> bytes:
        """Events that come before the first text of a choice."""
        return b""

    @abstractmethod
    def text(self, index: int, text: str, tokens: Sequence[int] = ()) -> bytes:
        """The event for text that has come, and for the tokens that came with it."""

    @abstractmethod
    def finish(self, index: int, reason: FinishReason, tokens: Sequence[int] = ()) -> bytes:
        """The event for the end of a choice, and for tokens that came without text."""

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A finished choice of a response that is not streamed, but for its tokens."""

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """The events at the end of the stream."""
        if not self._include_usage:
            return DONE
        last = {**self._head, "object": self.chunk_object, "choices": [], "usage": _usage(answers)}
        return event(_json(last)) + DONE

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """The body of a response that is not streamed."""
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        if self._with_tokens:
            for choice, answer in zip(choices, answers, strict=True):
                choice["token_ids"] = answer.tokens
        return _json({**self._head, "object": self.whole_object, "choices": choices, "usage": _usage(answers)})

    def _event(self, index: int, rest: bytes, tokens: Sequence[int] = ()) -> bytes:
        if tokens and self._with_tokens:
            rest = b'%b,"token_ids":%b' % (rest, _json(tokens))
        return b"%b%d,%b%b" % (self._before, index, rest, self._after)


class ChatFormat(Format):
    """For /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        """The role."""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self._event(index, delta)

    def text(self, index: int, text: str, tokens: Sequence[int] = ()) -> bytes:
        """A piece of the message."""
        delta = b'"delta":{"content":%b},"logprobs":null,"finish_reason":null' % _json(text)
        return self._event(index, delta, tokens)

    def finish(self, index: int, reason: FinishReason, tokens: Sequence[int] = ()) -> bytes:
        """Why the message ends."""
        return self._event(index, b'"delta":{},"logprobs":null,"finish_reason":%b' % _json(reason), tokens)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """The message."""
        message = {"role": "assistant", "content": answer.read(), "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": answer.finish}


class CompletionFormat(Format):
    """For /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def text(self, index: int, text: str, tokens: Sequence[int] = ()) -> bytes:
        """A piece of the text."""
        return self._event(index, b'"text":%b,"logprobs":null,"finish_reason":null' % _json(text), tokens)

    def finish(self, index: int, reason: FinishReason, tokens: Sequence[int] = ()) -> bytes:
        """Why the text ends."""
        return self._event(index, b'"text":"","logprobs":null,"finish_reason":%b' % _json(reason), tokens)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """The text."""
        return {"index": index, "text": answer.read(), "logprobs": None, "finish_reason": answer.finish}


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers)},
    }
