"""Reading one rank's share of a model's weights into the tensors that the decoder uses.

:func:`load_shard` returns a flat dictionary. All tensors have the requested dtype, lie contiguous on the requested
device, and hold only what this rank computes with: of the files, only the rows and columns of this rank are read.
With ``q``, ``kv``, ``mlp`` and ``rows`` the rank's share (``partition.q_heads.size``, ``.kv_heads.size``,
``.mlp.size``, ``.vocab_rows``) and ``N`` a layer's number from 0, the names are

=================================  ==================================  ===============================================
name                               shape                               content
=================================  ==================================  ===============================================
``embed.weight``                   [rows, hidden]                      this rank's rows of the vocabulary; zeros after
                                                                       the last valid row
``layers.N.attn_norm.weight``      [hidden]                            RMS norm before attention
``layers.N.attn.qkv.weight``       [(q + 2 kv) * head_dim, hidden]     query heads, then key heads, then value heads
``layers.N.attn.qkv.bias``         [(q + 2 kv) * head_dim]             only if ``config.qkv_bias``
``layers.N.attn.q_norm.weight``    [head_dim]                          only if ``config.qk_norm``
``layers.N.attn.k_norm.weight``    [head_dim]                          only if ``config.qk_norm``
``layers.N.attn.o.weight``         [hidden, q * head_dim]              its product is a partial sum over the ranks
``layers.N.attn.o.bias``           [hidden]                            only if ``config.o_bias``, and on rank 0 alone
``layers.N.mlp_norm.weight``       [hidden]                            RMS norm before the MLP
``layers.N.mlp.gate_up.weight``    [2 * mlp, hidden]                   gate rows, then up rows
``layers.N.mlp.gate_up.bias``      [2 * mlp]                           only if ``config.mlp_bias``
``layers.N.mlp.down.weight``       [hidden, mlp]                       its product is a partial sum over the ranks
``layers.N.mlp.down.bias``         [hidden]                            only if ``config.mlp_bias``, on rank 0 alone
``norm.weight``                    [hidden]                            RMS norm before the head
``head.weight``                    [rows, hidden]                      rows as in ``embed.weight``
=================================  ==================================  ===============================================

Biases of partial sums are on rank 0 alone because the all-reduce after the product would add them once a rank.

The embedding is split by vocabulary like the head. A rank looks up the tokens in its range, takes zeros for all
others, and one all-reduce (exact: all but one addend are zero) makes the whole; with one rank it is a plain lookup.
The other choice, a full copy on each rank, saves one all-reduce of the 2 * layers + 1 in a step and costs up to
gigabytes a rank. With tied embeddings ``head.weight`` *is* ``embed.weight``: the same tensor object, read once. A head
that a file has nevertheless must be equal.

The logits of the ranks side by side, in rank order, are ``[n, size * rows]``; those from ``vocab_size`` on are padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from tpserve.distributed.partition import Partition, Range
from tpserve.errors import ModelError
from tpserve.models.config import ModelConfig
from tpserve.weights.cache import model_files
from tpserve.weights.files import TensorFiles
from tpserve.weights.layout import Target, check_shapes, stored_shapes, targets

__all__ = ["Progress", "load_shard", "shard_bytes"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

NO_FLOAT = "is not stored as float64, float32, bfloat16 or float16"

ROWS = 4096
"""Of two matrices that are compared, at a time."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), rising to the end."""


def load_shard(
    folder: Path,
    config: ModelConfig,
    partition: Partition,
    dtype: torch.dtype,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Read what one rank needs of a model.

    Args:
        folder: holds the safetensors files.
        config: the model's shape.
        partition: this rank's share.
        dtype: of the returned tensors.
        device: where to put them.
        progress: told how far it is, after each tensor.

    Returns:
        The tensors of the table above.

    Raises:
        ModelError: tensors are missing, unknown, of another shape than ``config`` says, or not floating-point; or a
            head is stored that is not the embedding to which it is tied.
    """
    wanted = [target for target in targets(config, partition) if target.wanted]
    with model_files(folder), TensorFiles(folder) as files:
        _check(files, config)
        if config.tie_embeddings and HEAD in files.names():
            _check_tie(files, config, partition.vocab, dtype)
        total = sum(_bytes(target, dtype) for target in wanted)
        done = 0
        tensors = {}
        for target in wanted:
            tensors[target.name] = _assemble(files, target, dtype, device)
            done += _bytes(target, dtype)
            if progress is not None:
                progress(done, total)
    if config.tie_embeddings:
        tensors["head.weight"] = tensors["embed.weight"]
    return tensors


def shard_bytes(config: ModelConfig, partition: Partition, dtype: torch.dtype) -> int:
    """What :func:`load_shard` takes of the device's memory."""
    return sum(_bytes(target, dtype) for target in targets(config, partition) if target.wanted)


def _check(files: TensorFiles, config: ModelConfig) -> None:
    expected = stored_shapes(config)
    found = {name: files.shape(name) for name in files.names()}
    spare = [name for name in found if _is_redundant(name, config)]
    check_shapes(str(files.folder), "config.json", config, expected, found, spare)
    for name in expected:
        if not files.is_float(name):
            raise ModelError(f"{files.folder}: {name} {NO_FLOAT}")


def _check_tie(files: TensorFiles, config: ModelConfig, vocab: Range, dtype: torch.dtype) -> None:
    """Refuse a tied head that is another than the embedding, in this rank's rows: which of the two is meant?"""

    def read(name: str, start: int) -> torch.Tensor:
        return files.read(name, Range(start, min(start + ROWS, vocab.stop)), Range(0, config.hidden)).to(dtype)

    starts = range(vocab.start, vocab.stop, ROWS)
    if not files.is_float(HEAD):
        raise ModelError(f"{files.folder}: {HEAD} {NO_FLOAT}")
    if files.shape(HEAD) != files.shape(EMBEDDING) or not all(
        torch.allclose(read(HEAD, start), read(EMBEDDING, start), 0, 0, equal_nan=True) for start in starts
    ):
        raise ModelError(
            f"{files.folder}: {HEAD} differs from {EMBEDDING}, and config.json says 'tie_word_embeddings': true",
            "Write false there if the head is meant, or take it out of the file",
        )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Old files store the rotary frequencies too, and some store a tied head twice."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == HEAD)


def _assemble(files: TensorFiles, target: Target, dtype: torch.dtype, device: str) -> torch.Tensor:
    tensor = torch.empty(target.shape, dtype=dtype, device=device)
    row = 0
    for part in target.parts:
        tensor[row : row + part.rows.size].copy_(files.read(part.source, part.rows, part.columns))
        row += part.rows.size
    tensor[row:].zero_()
    return tensor


def _bytes(target: Target, dtype: torch.dtype) -> int:
    return math.prod(target.shape) * dtype.itemsize
