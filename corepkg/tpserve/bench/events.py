"""What a server streams: OpenAI's chunks as server-sent events, each timed when it comes."""

from __future__ import annotations

import time

import msgspec

__all__ = ["Events", "Usage"]

DONE = b"[DONE]"


class Text(msgspec.Struct, frozen=True):
    """What a chunk adds to a chat's message."""

    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """What a chunk adds to its choice: ``text`` of a completion or ``delta`` of a chat."""

    text: str | None = None
    delta: Text = Text()
    finish_reason: str | None = None


class Cached(msgspec.Struct, frozen=True):
    """More about the prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """The server's counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Cached | None = None


class Problem(msgspec.Struct, frozen=True):
    """Why a request failed."""

    message: str


class Event(msgspec.Struct, frozen=True):
    """One event of a stream, or the body of a refusal."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Problem | None = None


EVENT = msgspec.json.Decoder(Event)


class Events:
    """Server-sent events as they come.

    Attributes:
        arrivals: when each piece of text came.
        end: when the last choice ended.
        usage: the server's counts.
        is_done: the last event has come.
        problem: what went wrong; empty if nothing did.
    """

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.end = 0.0
        self.usage = Usage()
        self.is_done = False
        self.problem = ""
        self._rest = b""
        self._other: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Take the next piece of the body."""
        now = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)
            elif line.strip():
                self._other.append(line)

    def refusal(self) -> str:
        """What a body says that is no stream."""
        body = b"\n".join([*self._other, self._rest])
        try:
            error = EVENT.decode(body).error
        except (msgspec.DecodeError, RecursionError):
            error = None
        return error.message if error else body[:200].decode(errors="replace").strip()

    def _take(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.is_done = True
            return
        try:
            event = EVENT.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            self.problem = self.problem or f"an event that cannot be read: {error}"
            return
        if event.error is not None:
            self.problem = event.error.message
        for choice in event.choices:
            if choice.text or choice.delta.content:
                self.arrivals.append(now)
            if choice.finish_reason is not None:
                self.end = now
        self.usage = event.usage or self.usage
