"""One request in flight, as the HTTP side sees it: what has come, and what of it nobody has read yet."""

from __future__ import annotations

import asyncio

from tpserve.frontend.metrics import Meter
from tpserve.frontend.stops import StopMatcher
from tpserve.messages import FinishReason

__all__ = ["MAX_UNREAD", "Answer"]

MAX_UNREAD = 1 << 18
"""Characters of a stream that may wait for a slow reader, besides what socket buffers hold; past it, it is aborted."""


class Answer:
    """Grows as rounds come in, on the event loop.

    Args:
        uid: the request's identity.
        stop: texts that end it.
        wake: set when there is something to read; several answers may share it.
        is_streaming: whether text is to be read as it comes; if not, ``wake`` is set at the end alone.
        meter: counts and times it.

    Attributes:
        started: it has been admitted; the token counts of its prompt are known.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of these were found in the prefix cache.
        tokens: the output so far: those that completed a stop string, and an end-of-text token, included.
        finish: why it ended; None while it goes on, and if it failed.
        error: why it failed, or None.
    """

    __slots__ = (
        "_stops",
        "_unread",
        "_unread_chars",
        "_unread_from",
        "_wake",
        "cached_tokens",
        "error",
        "finish",
        "is_streaming",
        "meter",
        "prompt_tokens",
        "started",
        "tokens",
        "uid",
    )

    def __init__(self, uid: int, stop: tuple[str, ...], wake: asyncio.Event, is_streaming: bool, meter: Meter) -> None:
        self.uid = uid
        self.is_streaming = is_streaming
        self.meter = meter
        self.started = False
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self._wake = wake
        self._stops = StopMatcher(stop) if stop else None
        self._unread: list[str] = []
        self._unread_chars = 0
        self._unread_from = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.finish is not None or self.error is not None

    @property
    def is_overrun(self) -> bool:
        """Whether its reader is too far behind."""
        return self.is_streaming and self._unread_chars > MAX_UNREAD

    def read(self) -> str:
        """Take the text that has not been read."""
        text = "".join(self._unread)
        self._unread.clear()
        self._unread_chars = 0
        return text

    def read_tokens(self) -> list[int]:
        """Take the tokens that have not been read."""
        tokens = self.tokens[self._unread_from :]
        self._unread_from = len(self.tokens)
        return tokens

    def start(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The request has been admitted; called once."""
        self.started = True
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.meter.start(prompt_tokens, cached_tokens)
        if self.is_streaming:
            self._wake.set()

    def add(self, token: int, text: str, finish: FinishReason | None) -> None:
        """A token has come, or the end. A stop string found in the text finishes the answer."""
        if token >= 0:
            self.tokens.append(token)
            self.meter.token()
        if self._stops is not None:
            text, stopped = self._stops.push(text)
            if stopped:
                finish = "stop"
            elif finish is not None:
                text += self._stops.flush()
        if text:
            self._unread.append(text)
            self._unread_chars += len(text)
        self.finish = finish
        if finish is not None or (self.is_streaming and text):
            self._wake.set()

    def fail(self, error: Exception) -> None:
        """It ends here, without a finish."""
        self.error = error
        self._wake.set()
