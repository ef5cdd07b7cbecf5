"""How few tokens a text can have, told from its length: long before a tokenizer is through with it."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models

from tpserve.frontend.detokenize import BYTE_OF_CHAR

__all__ = ["Coverage"]

WHITESPACE = b" \t\n\r"
MARKS = bytes(byte for byte in range(128) if not chr(byte).isalnum())
FREE = ("ByteLevel", "Digits", "Metaspace")
"""Pre-tokenizers that never drop anything."""


class Coverage:
    """The most bytes of a text that one token of a tokenizer can stand for.

    Counted thrice: of all bytes; of those that are no white space, as the longest tokens often are lines of blanks; and
    of letters, digits and other scripts, as the next longest are rulers. Nothing is known of tokenizers that may
    drop or sum up any length of text: then every text counts as 0 tokens.

    Args:
        tokenizer: whatever is looked up in it stays as it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._normalizer = tokenizer.normalizer
        pieces = [_bytes_of(token) for token in tokenizer.get_vocab()]
        known = {piece for piece in pieces if len(piece) == 1}
        dropped = bytes(byte for byte in range(256) if bytes([byte]) not in known)
        self._longest: dict[bytes, int] = {}
        if _is_exhaustive(tokenizer):
            for left_out in (dropped, dropped + WHITESPACE, dropped + MARKS):
                self._longest[left_out] = max(len(piece.translate(None, left_out)) for piece in pieces)

    def least_tokens(self, text: str) -> int:
        """No tokenization of the text has fewer tokens."""
        if self._normalizer is not None and self._longest:
            text = self._normalizer.normalize_str(text)
        written = text.encode(errors="replace")
        return max(
            (
                -(-len(written.translate(None, left_out)) // longest)
                for left_out, longest in self._longest.items()
                if longest
            ),
            default=0,
        )


def _bytes_of(token: str) -> bytes:
    """What a token of a byte-level tokenizer stands for; an added one is written as it is."""
    try:
        return bytes(BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _is_exhaustive(tokenizer: Tokenizer) -> bool:
    """Whether each byte that the vocabulary knows becomes part of a token: byte-level BPE that cuts and never drops."""
    added = tokenizer.get_added_tokens_decoder().values()
    cutter = json.loads(tokenizer.pre_tokenizer.__getstate__()) if tokenizer.pre_tokenizer else {}
    return (
        isinstance(tokenizer.model, models.BPE)
        and tokenizer.model.unk_token is None
        and "ByteLevel" in json.dumps(cutter)
        and _keeps_all(cutter)
        and not any(token.lstrip or token.rstrip for token in added)
    )


def _keeps_all(cutter: dict[str, Any]) -> bool:
    match cutter:
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return all(map(_keeps_all, parts))
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": kind}:
            return kind in FREE
    return False
