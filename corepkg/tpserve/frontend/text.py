"""Text to tokens and back, for one model: its tokenizer and chat template, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tpserve.errors import ModelError, RequestError
from tpserve.frontend.chat_template import ChatTemplate
from tpserve.frontend.coverage import Coverage
from tpserve.frontend.detokenize import ByteStream, StreamDecoder, TokenBytes, WindowStream
from tpserve.values import TOO_DEEP
from tpserve.weights.cache import model_files

__all__ = ["TextCodec"]


class TextCodec:
    """One model's tokenizer. Make it with :meth:`from_folder`.

    Args:
        tokenizer: the tokenizer; its truncation and padding are switched off.
        template: the chat template, or None for a model that has none.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._table = TokenBytes(tokenizer, self._special) if is_byte_level else None

    @classmethod
    def from_folder(cls, folder: Path, *, or_bytes: bool = False) -> Self:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of a model's folder.

        Args:
            folder: the model's.
            or_bytes: where there is no tokenizer.json, every byte is a token: for models with dummy weights.

        Raises:
            ModelError: there is no tokenizer.json, or a file cannot be read.
        """
        if or_bytes and not (folder / "tokenizer.json").is_file():
            return cls(_byte_tokenizer())
        with model_files(folder):
            tokenizer = _read_tokenizer(folder)
            config = _read_json(folder / "tokenizer_config.json")
            source = _template_source(folder, config)
            special_tokens = _special_tokens(folder, _read_json(folder / "special_tokens_map.json") | config)
            return cls(tokenizer, ChatTemplate(source, special_tokens) if source else None)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The tokens of a text, with the special tokens that the model puts around one unless it has them already."""
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def least_tokens(self, text: str) -> int:
        """A text has at least so many tokens: far fewer than it really has, but told at once."""
        return self._coverage.least_tokens(text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], time: float | None = None, /, **args: Any
    ) -> list[int]:
        """The tokens of a conversation; as :meth:`render`."""
        return self.encode(self.render(messages, time, **args), special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, Any]], time: float | None = None, /, **args: Any) -> str:
        """The text of a conversation, up to where the assistant's answer begins.

        Args:
            messages: objects with a role, a content and whatever else the template reads.
            time: what the template takes for now, in seconds since 1970; None: now.
            **args: further variables of the template.

        Raises:
            RequestError: the model has no chat template, or the template refuses the conversation.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        return self._template.render(messages, args, time)

    @cached_property
    def _coverage(self) -> Coverage:
        return Coverage(self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def stream(self) -> StreamDecoder:
        """A decoder for one request's output; what it returns, joined, is what :meth:`decode` returns."""
        if self._table is not None:
            return ByteStream(self._table)
        return WindowStream(self._tokenizer, self._special)


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json", "Save the model's tokenizer there in Hugging Face's fast format."
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} cannot be read: {error}") from error


def _byte_tokenizer() -> Tokenizer:
    """A token for each of the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: token for token, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise ModelError(f"{path} is {TOO_DEEP}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object")
    return found


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, else in the configuration, there alone or as the one named default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    found = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = (entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default")
        found = next((entry.get("template") for entry in named), None)
    if not isinstance(found, str | None):
        raise ModelError(f"{folder}: the tokenizer's 'chat_template' must be a text, found {found!r}")
    return found


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The entries such as ``bos_token``, each a text or an object with the text as its content."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if not key.endswith("_token") or text is None or isinstance(text, int):  # as in "add_bos_token": true
            continue
        if not isinstance(text, str):
            raise ModelError(f"{folder}: the tokenizer's {key!r} must be a text, found {value!r}")
        found[key] = text
    return found
