"""The head of a GGUF file: enough to know what it holds before anything heavy is started.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little-endian files of versions 2
and 3 are read.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tpserve.errors import ModelError
from tpserve.values import TOO_DEEP

__all__ = ["ARCHITECTURES", "BFLOAT16", "FLOAT16", "GgufHeader", "read_header"]

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""The architectures that can be converted, as GGUF names them; Mistral's models are called llama there."""

NEEDED = ("context_length", "attention.layer_norm_rms_epsilon")
"""Keys in whose place transformers would take numbers of its own, and no tensor's shape would tell."""

DAMAGED = "The file is damaged or incomplete"

ALIGNMENT = 32
"""Where a file does not say."""

FLOAT16, BFLOAT16 = 1, 30
"""Numbers of two tensor types."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GgufHeader(msgspec.Struct, frozen=True):
    """What a GGUF file says about itself.

    Attributes:
        metadata: its keys and values; arrays are left out.
        tensors: the shapes of all tensors, rows first.
        matrix_types: the type numbers of tensors with two or more dimensions.
        places: each tensor's type number, and where in the file it begins.
        data: where the first may begin.
        alignment: of this many bytes every beginning is a multiple.
    """

    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    matrix_types: set[int]
    places: dict[str, tuple[int, int]] = {}
    data: int = 0
    alignment: int = ALIGNMENT

    @property
    def architecture(self) -> str:
        """The model's architecture in GGUF's words."""
        return str(self.metadata.get("general.architecture", "unknown"))

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

    metadata = {}
    for _ in range(keys):
        name = _string(file, size)
        if name in metadata:
            raise ValueError(f"it has the key {name} twice")
        metadata[name] = _value(file, _scalar(file, "<I"), size)
    metadata = {name: value for name, value in metadata.items() if value is not None}

    shapes, types, offsets = {}, set(), {}
    for _ in range(tensors):
        name = _string(file, size)
        if name in shapes:
            raise ValueError(f"it has the tensor {name} twice")
        dimensions = [_scalar(file, "<Q") for _ in range(_scalar(file, "<I"))]
        shapes[name] = tuple(reversed(dimensions))  # the file has the length of a row first
        kind = _scalar(file, "<I")
        offsets[name] = kind, _scalar(file, "<Q")
        if len(dimensions) > 1:
            types.add(kind)

    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"its general.alignment is {alignment!r}")
    data = -(-file.tell() // alignment) * alignment
    places = {name: (kind, data + offset) for name, (kind, offset) in offsets.items()}
    return GgufHeader(metadata, shapes, types, places, data, alignment)


def _value(file: BinaryIO, kind: int, size: int) -> Any:
    """Read one value; an array is passed over and gives None."""
    if kind == _STRING:
        return _string(file, size)
    if kind != _ARRAY:
        return _scalar(file, _SCALARS[kind])
    element, count = _scalar(file, "<I"), _scalar(file, "<Q")
    if count > size:
        raise ValueError(f"an array of {count} values in a file of {size}")
    if element in _SCALARS:
        file.seek(count * struct.calcsize(_SCALARS[element]), 1)
    else:
        for _ in range(count):
            _value(file, element, size)
    return None


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
            f"{path} holds a model of architecture {header.architecture!r}, which is not supported",
            f"Supported in GGUF files: {', '.join(ARCHITECTURES)}",
        )
    if header.key("expert_count"):
        raise ModelError(f"{path} holds a mixture of experts, which is not supported")
    if "rope_freqs.weight" in header.tensors or header.key("rope.scaling.type") not in (None, "none"):
        raise ModelError(
            f"{path} needs scaled rotary positions, which its conversion would lose",
            "Use the model's folder with config.json and safetensors files instead",
        )


def _refuse_what_is_not_whole(path: Path, header: GgufHeader) -> None:
    lacking = [f"{header.architecture}.{name}" for name in NEEDED if header.key(name) is None]
    if lacking:
        raise ModelError(f"{path} lacks {', '.join(lacking)} in its metadata", DAMAGED)
    # All other tensors are checked in the conversion; this one comes before something is made for each layer claimed.
    claimed = header.key("block_count") or 0
    found = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if claimed != len(found):
        raise ModelError(
            f"{path} has tensors of {len(found)} layers, and {claimed} by its {header.architecture}.block_count",
            DAMAGED,
        )
