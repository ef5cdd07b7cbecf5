"""The head of a GGUF file: enough to know what it holds before anything heavy is started.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little-endian files of versions 2
and 3 are read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tpserve.errors import ModelError
from tpserve.values import TOO_DEEP, brief
from tpserve.weights import DAMAGED
from tpserve.weights.splits import SPLITS

__all__ = [
    "ARCHITECTURES",
    "BFLOAT16",
    "FLOAT16",
    "HEAD_SIZES",
    "INSTEAD",
    "WINDOW",
    "GgufHeader",
    "read_header",
]

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""The architectures that can be converted, as GGUF names them; Mistral's models are called llama there."""

NEEDED = (
    "context_length",
    *(f"attention.{name}" for name in ("head_count", "head_count_kv", "layer_norm_rms_epsilon")),
)
"""Keys in whose place transformers would take numbers of its own, and no tensor's shape would tell."""

HEAD_SIZES = ("attention.key_length", "attention.value_length", "attention.head_dim", "rope.dimension_count")
"""Keys that transformers does not read for every architecture: heads that are not of their size would be others."""

WINDOW = "attention.sliding_window"

COUNTS = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", *HEAD_SIZES),
)
NUMBERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
"""The architecture's keys that a conversion takes over or is held against. Any other is refused, for what it says would
be lost, unless that is nothing:"""

MUTE = (
    *("attention.layer_norm_epsilon", "pooling_type"),
    *("rope.scaling.finetuned", "rope.scaling.original_context_length"),
)
"""Keys of what these models have not, of what is not done with them here, or of no effect without another."""

NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "tensor_data_layout": "Meta AI original pth",
    "rope.scaling.type": "none",
    **dict.fromkeys(("rope.scaling.factor", "rope.scaling.attn_factor", "rope.scale", "rope.scale_linear"), 1),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), 1),
}
"""Values that change nothing. Nor does 0 or false, whatever the key, except where true is what changes nothing."""

TOKENS, MERGES, SCORES = (f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores"))
SPLIT = "tokenizer.ggml.pre"
SPECIAL = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown", "padding"))

INSTEAD = "Use the model's folder with config.json and safetensors files instead"

MOST = 4
"""Of what an error lists."""

BYTE_LEVEL = "gpt2"
"""The kind of vocabulary of which a file must say where texts are split."""

MOST_DIMENSIONS = 4
"""That the format allows."""

ALIGNMENT = 32
"""Where a file does not say."""

FLOAT16, BFLOAT16 = 1, 30
"""Numbers of two tensor types."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GgufHeader(msgspec.Struct, frozen=True):
    """What a GGUF file says about itself.

    Attributes:
        metadata: its keys and values, but for arrays.
        tensors: the shapes of all tensors, rows first.
        matrix_types: the type numbers of tensors with two or more dimensions.
        places: each tensor's type number, and where in the file it begins.
        data: where the first may begin.
        alignment: of this many bytes every beginning is a multiple.
        arrays: how many values each array of the metadata has.
    """

    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    matrix_types: set[int]
    places: dict[str, tuple[int, int]]
    data: int
    alignment: int
    arrays: dict[str, int]

    @property
    def architecture(self) -> str:
        """The model's architecture in GGUF's words."""
        return str(self.metadata.get("general.architecture", "unknown"))

    @property
    def split(self) -> str | None:
        """Where its tokenizer splits texts, in GGUF's words; None for a vocabulary that does without."""
        is_byte_level = self.metadata.get("tokenizer.ggml.model") == BYTE_LEVEL
        return str(self.metadata.get(SPLIT, "")) if is_byte_level else None

    def key(self, name: str) -> Any:
        """A value of the architecture's own keys, or None."""
        return self.metadata.get(f"{self.architecture}.{name}")


def read_header(path: Path) -> GgufHeader:
    """Read a file's head.

    Raises:
        ModelError: the file is not GGUF, is damaged, or holds a model that cannot be converted faithfully.
    """
    try:
        with path.open("rb") as file:
            header = _read(file, path.stat().st_size)
    except RecursionError:
        raise ModelError(f"{path} is not a readable GGUF file: it is {TOO_DEEP}") from None
    except (ValueError, KeyError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    _refuse_what_conversion_loses(path, header)
    _refuse_what_is_not_whole(path, header)
    return header


def _read(file: BinaryIO, size: int) -> GgufHeader:
    magic, version = file.read(4), _scalar(file, "<I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it starts with {magic!r}, version {version}")
    tensors, keys = _scalar(file, "<Q"), _scalar(file, "<Q")

    metadata: dict[str, Any] = {}
    arrays: dict[str, int] = {}
    for _ in range(keys):
        name, kind = _string(file, size), _scalar(file, "<I")
        if name in metadata or name in arrays:
            raise ValueError(f"it has the key {brief(name)} twice")
        if kind == _ARRAY:
            arrays[name] = _pass_array(file, size)
        else:
            metadata[name] = _value(file, kind, size)

    shapes, types, offsets = {}, set(), {}
    for _ in range(tensors):
        name = _string(file, size)
        if name in shapes:
            raise ValueError(f"it has the tensor {brief(name)} twice")
        count = _scalar(file, "<I")
        if count > MOST_DIMENSIONS:
            raise ValueError(f"it has the tensor {brief(name)} of {count} dimensions")
        dimensions = [_scalar(file, "<Q") for _ in range(count)]
        shapes[name] = tuple(reversed(dimensions))  # the file has the length of a row first
        kind = _scalar(file, "<I")
        offsets[name] = kind, _scalar(file, "<Q")
        if len(dimensions) > 1:
            types.add(kind)

    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"its general.alignment is {brief(repr(alignment))}")
    data = -(-file.tell() // alignment) * alignment
    places = {name: (kind, data + offset) for name, (kind, offset) in offsets.items()}
    return GgufHeader(metadata, shapes, types, places, data, alignment, arrays)


def _value(file: BinaryIO, kind: int, size: int) -> Any:
    if kind != _STRING and kind not in _SCALARS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _string(file, size) if kind == _STRING else _scalar(file, _SCALARS[kind])


def _pass_array(file: BinaryIO, size: int) -> int:
    """Pass over an array and return its length."""
    kind, count = _scalar(file, "<I"), _scalar(file, "<Q")
    if count > size:
        raise ValueError(f"an array of {count} values in a file of {size}")
    if kind in _SCALARS:
        file.seek(count * struct.calcsize(_SCALARS[kind]), 1)
        return int(count)
    for _ in range(count):
        if kind == _ARRAY:
            _pass_array(file, size)
        else:
            _value(file, kind, size)
    return int(count)


def _string(file: BinaryIO, size: int) -> str:
    length = _scalar(file, "<Q")
    if length > size:
        raise ValueError(f"a text of {length} bytes in a file of {size}")
    return _exactly(file, length).decode("utf-8", errors="replace")


def _scalar(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, _exactly(file, struct.calcsize(layout)))[0]


def _exactly(file: BinaryIO, length: int) -> bytes:
    found = file.read(length)
    if len(found) < length:
        raise ValueError("it ends too soon")
    return found


def _refuse_what_conversion_loses(path: Path, header: GgufHeader) -> None:
    if header.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path} holds a model of architecture {brief(repr(header.architecture))}, which is not supported",
            f"Supported in GGUF files: {', '.join(ARCHITECTURES)}",
        )
    if header.key("expert_count"):
        raise ModelError(f"{path} holds a mixture of experts, which is not supported")
    if "rope_freqs.weight" in header.tensors:
        raise ModelError(f"{path} needs scaled rotary positions, which its conversion would lose", INSTEAD)
    own = f"{header.architecture}."
    lost = [
        f"{brief(key)} = {brief(repr(value))}" for key, value in header.metadata.items() if _is_lost(key, own, value)
    ]
    lost += [f"{brief(key)}, {count} values" for key, count in header.arrays.items() if key.startswith(own)]
    if lost:
        more = f" and {len(lost) - MOST} more" if len(lost) > MOST else ""
        raise ModelError(f"{path} says {'; '.join(lost[:MOST])}{more}: its conversion would lose that", INSTEAD)
    if header.split is not None and header.split not in SPLITS:
        said = f"{SPLIT} = {brief(repr(header.split))}" if header.split else f"nothing of {SPLIT}"
        raise ModelError(f"{path} says {said}: where its tokenizer splits a text is not known", INSTEAD)


def _is_lost(key: str, own: str, value: Any) -> bool:
    name = key.removeprefix(own)
    if name == key or name in (*COUNTS, *NUMBERS, WINDOW, *MUTE):
        return False
    neutral = NEUTRAL.get(name, 0)
    return bool(value != neutral and (value or neutral is True))


def _refuse_what_is_not_whole(path: Path, header: GgufHeader) -> None:
    own = f"{header.architecture}."
    needed = [*(own + name for name in NEEDED), TOKENS, *([] if header.arrays.get(SCORES) else [MERGES])]
    lacking = [name for name in needed if name not in header.metadata and not header.arrays.get(name)]
    if lacking:
        raise ModelError(f"{path} lacks {', '.join(lacking)} in its metadata", INSTEAD)
    tokens = header.arrays[TOKENS]
    checks: list[tuple[str, Iterable[str], Callable[[Any], bool]]] = [
        ("a positive integer", (own + name for name in COUNTS), lambda value: type(value) is int and value > 0),
        ("a positive number", (own + name for name in NUMBERS), lambda value: _is_real(value) and 0 < value < math.inf),
        ("an integer from 0", [own + WINDOW], lambda value: type(value) is int and value >= 0),
        (f"one of {tokens} tokens", SPECIAL, lambda value: type(value) is int and 0 <= value < tokens),
    ]
    for expected, names, is_right in checks:
        for name in names:
            value = header.metadata.get(name)
            if value is not None and not is_right(value):
                raise ModelError(f"{path}: its {name} must be {expected}, found {brief(repr(value))}", DAMAGED)
    # All other tensors are checked in the conversion; this one comes before something is made for each layer claimed.
    claimed = header.key("block_count") or 0
    found = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if claimed != len(found):
        raise ModelError(
            f"{path} has tensors of {len(found)} layers, and {claimed} by its {own}block_count",
            DAMAGED,
        )


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
