"""Messages of an exact size, sealed as a tokenizer seals them.

A message is a request with up to 2,048 token ids. What a larger one has beyond that stands for an attachment: a field
that a rank carries and checks, and does not look into. One too small for a request is an abort.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from tpserve.envelope import SIZE, Sealer
from tpserve.tokens import ITEM, pack_ids

__all__ = ["SMALLEST", "Mint"]

SMALLEST = 64
MOST_TOKENS = 2048
TOKEN_BYTES = ITEM
MARK = 0x7FED_CBA9_8765_4321
"""Stands for the uid in a template; no other field has these bytes."""


class Mint:
    """Makes frames of one producer, each with a uid of its own.

    Args:
        seed: of the uids.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._sealer = Sealer(producer=1)
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def frame(self, size: int) -> bytes:
        """The next frame, of ``size`` ≥ 64 bytes."""
        if size not in self._templates:
            head, _, tail = _template(size - SIZE).partition(MARK.to_bytes(8, "big"))
            self._templates[size] = head, tail
        head, tail = self._templates[size]
        uid = self._random.randrange(1 << 32, 1 << 63)
        return self._sealer.seal(b"".join((head, uid.to_bytes(8, "big"), tail)))

    def frames(self, count: int, size: int) -> list[bytes]:
        """The next frames."""
        return [self.frame(size) for _ in range(count)]


def _template(size: int) -> bytes:
    """A message of this size without its envelope."""
    base = len(_request(0, None))
    for tokens in range(min(MOST_TOKENS, (size - base) // TOKEN_BYTES), -1, -1):
        found = _padded(size, _request(tokens, None), lambda padding, n=tokens: _request(n, padding))
        if found is not None:
            return found
    abort: dict[str, Any] = {"type": "abort", "uid": MARK}
    found = _padded(size, msgspec.msgpack.encode(abort), lambda padding: msgspec.msgpack.encode(abort | {"x": padding}))
    assert found is not None, f"no message has {size} bytes"
    return found


def _request(tokens: int, padding: bytes | None) -> bytes:
    message: dict[str, Any] = {
        "type": "generate",
        "uid": MARK,
        "prompt_ids": pack_ids(1000 + index % 40000 for index in range(tokens)),
        "params": {"max_tokens": 64, "seed": 1},
    }
    return msgspec.msgpack.encode(message if padding is None else message | {"x": padding})


def _padded(size: int, bare: bytes, pad: Any) -> bytes | None:
    """The message with as much padding as makes it fit; None if no amount does, for its header grows in steps."""
    if len(bare) == size:
        return bare
    for header in (4, 5, 7):
        room = size - len(bare) - header
        if room >= 0 and len(found := pad(b"\x55" * room)) == size:
            return bytes(found)
    return None
