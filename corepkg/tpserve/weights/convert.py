"""Turning a GGUF file into a Hugging Face folder: ``python -m tpserve.weights.convert SOURCE.gguf FOLDER``.

Runs in a process of its own, because it imports torch and takes much memory. Says what it does on standard output, one
line each. Weights are stored as the file has them where that is bfloat16 or float16; quantised ones become float32,
which holds them exactly.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpserve.errors import UserError
from tpserve.models.config import DType, ModelConfig
from tpserve.weights.cache import build_once
from tpserve.weights.gguf import BFLOAT16, FLOAT16, GgufHeader, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CONVERTER_VERSION", "main"]

CONVERTER_VERSION = 1
"""Part of the cache's key; raised when the folders that come out change."""


def main() -> None:
    """Convert, unless the folder is already there; exit code 2 and one line for what the caller can mend."""
    arguments = _parser().parse_args()
    if arguments.attached:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        header = read_header(arguments.source)
        build_once(
            arguments.folder,
            lambda folder: _convert(arguments.source, header, folder),
            lambda: _say("another process is converting the same file; waiting for it"),
        )
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
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
    """Leave at once when standard input ends, as it does when whoever holds its other end is gone."""
    # Not through sys.stdin: a thread that holds its lock breaks the interpreter's own exit.
    while os.read(0, 4096):
        pass
    os._exit(1)


def _convert(source: Path, header: GgufHeader, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # all that is needed is in the file
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = stored_dtype(header)
    _say(f"storing the weights as {dtype}")
    where: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    where["config"] = AutoConfig.from_pretrained(**where)  # handed on, or each call would parse the file again for it
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    _save(model, folder)
    ModelConfig.from_folder(folder)


def _save(model: PreTrainedModel, folder: Path) -> None:
    """Do what ``save_pretrained`` refuses for a model that came from a quantised file."""
    from huggingface_hub import save_torch_state_dict

    config = copy.deepcopy(model.config)
    del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    save_torch_state_dict(model.state_dict(), folder, metadata={"format": "pt"}, shared_tensors_to_discard=tied)


if __name__ == "__main__":
    main()
