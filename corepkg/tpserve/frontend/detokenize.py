"""Turning the tokens of one request into text as they come.

Never half a character: bytes that may still become one are held back. What the pushes and the final flush return,
joined, is the decoding of all tokens at once. Each token costs a bounded amount of work.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from tokenizers import Tokenizer

__all__ = ["ByteStream", "StreamDecoder", "TokenBytes", "WindowStream"]

MAX_HELD = 8
"""Tokens that a WindowStream holds back at most; a UTF-8 character has no more than four bytes."""

REPLACEMENT = "\ufffd"


class StreamDecoder(Protocol):
    """The text of one request, token by token."""

    def push(self, token: int) -> str:
        """What the token adds; empty for special and unknown ones and while a character is incomplete."""

    def flush(self) -> str:
        """What is left at the end: replacement characters for a character that stayed incomplete."""


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level tokenizer, looked up when first needed.

    Args:
        tokenizer: one whose decoder is ByteLevel.
        special: tokens that stand for no text.
    """

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(special, b""))
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token) or ""
        try:
            found = bytes(BYTE_OF_CHAR[char] for char in piece)
        except KeyError:  # an added token is written as it is, not in the byte alphabet
            found = piece.encode()
        self[token] = found
        return found


class ByteStream:
    """A :class:`StreamDecoder` for byte-level tokenizers, exact for any sequence of tokens."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        """What the token adds."""
        return self._decode(self._table[token])

    def flush(self) -> str:
        """A replacement character if the text ends within a character."""
        return self._decode(b"", final=True)


class WindowStream:
    """A :class:`StreamDecoder` for every other tokenizer (sentencepiece, word pieces).

    What a token adds depends on the one before (a leading space, a character in several byte tokens), so the last
    tokens that gave text are decoded together with the new ones. It differs from decoding all at once only in how many
    replacement characters stand for bytes that are not UTF-8.

    Args:
        tokenizer: decodes a few tokens at a time.
        special: tokens that stand for no text.
    """

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """What the token adds."""
        if token in self._special or self._tokenizer.id_to_token(token) is None:
            return ""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_HELD:
            return ""
        self._context = self._pending
        self._context_text = self._decode(self._context)
        self._pending = []
        return text

    def flush(self) -> str:
        """What is still held back."""
        text = self._new_text() if self._pending else ""
        self._pending = []
        return text

    def _new_text(self) -> str:
        text = self._decode(self._context + self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(self._pending)  # broken bytes changed how the context decodes

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary.

    Printable Latin-1 stands for itself, the others follow from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()
