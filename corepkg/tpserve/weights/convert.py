"""Turning a GGUF file into a Hugging Face folder: ``python -m tpserve.weights.convert SOURCE.gguf FOLDER``.

Runs in a process of its own, because it imports torch and takes much memory. Says what it does on standard output, one
line each. Weights are stored as the file has them where that is bfloat16 or float16; quantised ones become float32,
which holds them exactly.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from tpserve.errors import ModelError, UserError
from tpserve.models.config import DType, ModelConfig
from tpserve.values import brief
from tpserve.weights import DAMAGED
from tpserve.weights.cache import build_once
from tpserve.weights.gguf import BFLOAT16, FLOAT16, HEAD_SIZES, INSTEAD, WINDOW, GgufHeader, read_header
from tpserve.weights.layout import check_shapes, stored_shapes
from tpserve.weights.splits import SPLITS, set_split

__all__ = ["CONVERTER_VERSION", "GRACE", "main", "stored_dtype"]

GRACE = 5.0
"""Seconds that a converter takes at most to leave when nobody waits for it any more."""

FULL = (errno.ENOSPC, errno.EDQUOT)

CONVERTER_VERSION = 5
"""Part of the cache's key; raised when the folders that come out change, or fewer files are taken."""

ADD_BOS = "tokenizer.ggml.add_bos_token"

SPARE = "attn_rot_embd.weight"
"""Rotary frequencies, which old files have in each layer; they follow from the metadata."""


def main() -> None:
    """Convert, unless the folder is already there; exit code 2 and one line for what the caller can mend."""
    arguments = _parser().parse_args()
    try:
        if arguments.attached:
            signal.signal(signal.SIGTERM, _leave)
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a shell's background job
                signal.signal(signal.SIGINT, _leave)
            threading.Thread(target=_end_with_parent, daemon=True).start()
        header = read_header(arguments.source)
        build_once(
            arguments.folder,
            lambda folder: _convert(arguments.source, header, folder),
            lambda: _say("another process is converting the same file; waiting for it"),
        )
    except KeyboardInterrupt:
        sys.exit(1)
    except UserError as error:
        _refuse(str(error))
    except Exception as error:
        # Libraries that write have errors of their own for it.
        if not any(os.strerror(number) in str(error) for number in FULL):
            raise
        _refuse(f"no room in the cache {arguments.folder.parent}; TPSERVE_CACHE says where it is")


def _leave(*_: object) -> NoReturn:
    """Go, and remove what is half made; that is not interrupted again."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"error: {text}\n")
    sys.exit(2)


def stored_dtype(header: GgufHeader) -> DType:
    """The dtype in which a file's weights are kept."""
    if header.matrix_types == {BFLOAT16}:
        return "bfloat16"
    return "float16" if header.matrix_types == {FLOAT16} else "float32"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpserve.weights.convert", description=__doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE.gguf")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="appears whole or not at all")
    parser.add_argument("--attached", action="store_true", help="leave when standard input ends")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    """Leave soon when standard input ends, as it does when whoever holds its other end is gone."""
    # Not through sys.stdin: a thread that holds its lock breaks the interpreter's own exit.
    while os.read(0, 4096):
        pass
    converting = threading.main_thread().ident
    assert converting is not None
    signal.pthread_kill(converting, signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def _convert(source: Path, header: GgufHeader, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # all that is needed is in the file
    import gguf

    _check_places(header, source.stat().st_size, gguf)
    import torch
    import transformers

    # transformers asks for the same again and again, the whole file parsed among it: three times as much work as once.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, cache(getattr(gguf, name)))
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = stored_dtype(header)
    _say(f"storing the weights as {dtype}; for a small model that takes half a minute")
    where: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    # Handed on, or each call would parse the file again for it.
    with _reading("metadata"):
        where["config"] = transformers.AutoConfig.from_pretrained(**where)
    where["config"].save_pretrained(folder)
    config = _config(folder)
    _check_config(header, config)
    _check_tensors(header, config, gguf)
    split = SPLITS[header.split] if header.split is not None else None
    begins = {"add_bos_token": True} if split and split.bos and ADD_BOS not in header.metadata else {}
    with _reading("tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where, **begins)
    if split is not None:
        set_split(tokenizer.backend_tokenizer, split)
    tokenizer.save_pretrained(folder)
    # Releases that have this class keep weights packed unless told not to; older ones know no other way.
    if hasattr(transformers, "GgufConfig"):
        where["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _reading("weights"):
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """What a library says of a file that is not as it expects, in a line that tells what was read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries check little of what they read: it may be of any kind
        said = brief(" ".join(f"{type(error).__name__}: {error}".split()).rstrip("."), 500)
        raise ModelError(f"its {what} cannot be read: {said}", INSTEAD) from error


def _config(folder: Path) -> ModelConfig:
    try:
        return ModelConfig.from_folder(folder)
    except ModelError as error:  # names a folder that will be gone, and what is wrong is not in there
        said = error.message.replace(f"{folder / 'config.json'}:", "by its metadata,")
        raise ModelError(said, error.hint) from error


def _check_places(header: GgufHeader, size: int, gguf: Any) -> None:
    """Refuse a file whose tensors do not follow each other without a gap, as the format has them.

    One would be read from another's bytes, or as another type than it was written in.
    """
    types = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    end, before = header.data, "the head"
    for name, (kind, begin) in sorted(header.places.items(), key=lambda each: each[1][1]):
        if kind not in types:
            raise ModelError(f"{brief(name)} is of the unknown type {kind}", DAMAGED)
        if begin != -(-end // header.alignment) * header.alignment:
            raise ModelError(f"{brief(name)} begins at byte {begin}, and {brief(before)} ends at {end}", DAMAGED)
        elements, length = types[kind]
        end, before = begin + prod(header.tensors[name]) // elements * length, name
        if end > size:
            raise ModelError(f"{brief(name)} ends at byte {end}, and the file at {size}", DAMAGED)


def _check_config(header: GgufHeader, config: ModelConfig) -> None:
    """Refuse a file of which transformers does not take over all that it says."""
    for key in HEAD_SIZES:
        if header.key(key) not in (None, config.head_dim):
            raise _otherwise(header, key, f"heads of {config.head_dim}")
    # transformers takes no window over, and makes one of a mere name. As long as the context, it is none.
    window, context = header.key(WINDOW) or 0, config.max_context
    if (window if window < context else 0) != config.sliding_window:
        raise _otherwise(header, WINDOW, str(config.sliding_window or "no window"))


def _otherwise(header: GgufHeader, key: str, made: str) -> ModelError:
    said = "absent" if header.key(key) is None else header.key(key)
    return ModelError(
        f"the file's {header.architecture}.{key} is {said}, and its conversion would make {made}", INSTEAD
    )


def _check_tensors(header: GgufHeader, config: ModelConfig, gguf: Any) -> None:
    """Refuse a file whose tensors are not the model's: transformers draws at random what it does not find."""
    architecture = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[header.architecture]
    names = gguf.get_tensor_name_map(architecture, config.layers)
    expected = {
        names.get_name(name, try_suffixes=(".weight", ".bias")): shape for name, shape in stored_shapes(config).items()
    }
    spare = [name for name in header.tensors if name.endswith(SPARE)]
    check_shapes("the file", "its metadata", config, expected, header.tensors, spare)


if __name__ == "__main__":
    main()
