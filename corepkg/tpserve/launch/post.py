"""What one process needs to know to take its place in a server or an offline engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tpserve.config import ServeConfig
from tpserve.launch.compose import Composition
from tpserve.launch.layout import Layout
from tpserve.weights.source import ModelFolder

__all__ = ["ApiPost", "Post", "read_post", "write_post"]

P = TypeVar("P", bound=msgspec.Struct)


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """A process's place.

    Attributes:
        config: the settings.
        composition: the parts.
        model: the model on this machine.
        layout: where the processes meet.
        index: which rank, tokenizer or detokenizer this is.
    """

    config: ServeConfig
    composition: Composition
    model: ModelFolder
    layout: Layout
    index: int = 0


class ApiPost(msgspec.Struct, frozen=True):
    """The api process's place.

    Attributes:
        post: as for all others; its layout is that of no generation in particular.
        model_name: the name that clients use.
        socket: descriptor of the socket to serve on.
    """

    post: Post
    model_name: str
    socket: int


def write_post(post: msgspec.Struct) -> msgspec.Raw:
    """Encode a place as the payload of a ChildSpec."""
    return msgspec.Raw(msgspec.json.encode(post, enc_hook=str))


def read_post(payload: msgspec.Raw, type_: type[P]) -> P:
    """Decode what :func:`write_post` encoded."""
    return msgspec.json.decode(payload, type=type_, dec_hook=_decode)


def _decode(type_: type, value: Any) -> Any:
    assert type_ is Path, type_
    return Path(value)
