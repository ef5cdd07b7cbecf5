"""Which part of which stored tensor goes where: from Hugging Face names to those of :mod:`tpserve.weights.loader`.

Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tpserve.distributed.partition import Partition, Range
from tpserve.errors import ModelError
from tpserve.models.config import ModelConfig
from tpserve.values import brief

__all__ = ["Part", "Shapes", "Target", "check_shapes", "stored_shapes", "targets"]

Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors, by name."""


class Part(msgspec.Struct, frozen=True):
    """A piece of one stored tensor.

    Attributes:
        source: name of the stored tensor.
        shape: its whole shape, one or two dimensions.
        rows: the rows to take; for a vector, the elements.
        columns: the columns to take; None for a vector.
    """

    source: str
    shape: tuple[int, ...]
    rows: Range
    columns: Range | None = None


class Target(msgspec.Struct, frozen=True):
    """A tensor that the decoder uses: its parts stacked by rows, then rows of zeros.

    Attributes:
        name: as the loader's table has it.
        parts: what it is made of, in order.
        padding: rows of zeros at the end.
        wanted: whether this rank has it; where not, its sources are only checked.
    """

    name: str
    parts: list[Part]
    padding: int = 0
    wanted: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        rows = sum(part.rows.size for part in self.parts) + self.padding
        columns = self.parts[0].columns
        return (rows,) if columns is None else (rows, columns.size)


def targets(config: ModelConfig, partition: Partition) -> Iterator[Target]:
    """All tensors of one rank, in the order in which a model uses them."""
    yield _vocabulary("embed.weight", "model.embed_tokens.weight", config, partition)
    for layer in range(config.layers):
        yield from _attention(config, partition, f"layers.{layer}", f"model.layers.{layer}")
        yield from _mlp(config, partition, f"layers.{layer}", f"model.layers.{layer}")
    yield _vector("norm.weight", "model.norm.weight", config.hidden)
    if not config.tie_embeddings:
        yield _vocabulary("head.weight", "lm_head.weight", config, partition)


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All tensors that a model's files must have."""
    whole = targets(config, Partition.of(config, 1, 0))
    return {part.source: part.shape for target in whole for part in target.parts}


def check_shapes(
    where: str, said_by: str, config: ModelConfig, expected: Shapes, found: Shapes, spare: Iterable[str]
) -> None:
    """Hold a model's tensors against those that it must have.

    Args:
        where: what holds them, for messages.
        said_by: what the model's shape was read from, for messages.
        config: that shape.
        expected: those that it must have.
        found: those that it has.
        spare: names that it may have beside them.

    Raises:
        ModelError: tensors are missing, unknown or of another shape.
    """
    layers = f"{config.layers} layer{'' if config.layers == 1 else 's'}"
    model = f"By {said_by} it is a {config.architecture} of {layers}, which"
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ModelError(f"{where} lacks {_list(missing)}", f"{model} needs them")
    extra = sorted(found.keys() - expected.keys() - set(spare))
    if extra:
        raise ModelError(f"{where} has {_list(extra)}", f"{model} has no such")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"{where}: {name} has shape {list(found[name])}, and {said_by} makes it {list(shape)}")


def _list(names: list[str]) -> str:
    shown = ", ".join(map(brief, names[:4]))
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more tensors"


def _attention(config: ModelConfig, partition: Partition, here: str, there: str) -> Iterator[Target]:
    size = config.head_dim
    q, kv = _scaled(partition.q_heads, size), _scaled(partition.kv_heads, size)
    q_width, kv_width = config.q_heads * size, config.kv_heads * size
    projections = [("q_proj", q_width, q), ("k_proj", kv_width, kv), ("v_proj", kv_width, kv)]

    yield _vector(f"{here}.attn_norm.weight", f"{there}.input_layernorm.weight", config.hidden)
    yield _rows(f"{here}.attn.qkv.weight", f"{there}.self_attn", projections, config.hidden)
    if config.qkv_bias:
        yield _biases(f"{here}.attn.qkv.bias", f"{there}.self_attn", projections)
    if config.qk_norm:
        yield _vector(f"{here}.attn.q_norm.weight", f"{there}.self_attn.q_norm.weight", size)
        yield _vector(f"{here}.attn.k_norm.weight", f"{there}.self_attn.k_norm.weight", size)
    yield _columns(f"{here}.attn.o.weight", f"{there}.self_attn.o_proj.weight", config.hidden, q_width, q)
    if config.o_bias:
        yield _vector(f"{here}.attn.o.bias", f"{there}.self_attn.o_proj.bias", config.hidden, partition.rank == 0)


def _mlp(config: ModelConfig, partition: Partition, here: str, there: str) -> Iterator[Target]:
    width, mine = config.intermediate, partition.mlp
    projections = [("gate_proj", width, mine), ("up_proj", width, mine)]

    yield _vector(f"{here}.mlp_norm.weight", f"{there}.post_attention_layernorm.weight", config.hidden)
    yield _rows(f"{here}.mlp.gate_up.weight", f"{there}.mlp", projections, config.hidden)
    if config.mlp_bias:
        yield _biases(f"{here}.mlp.gate_up.bias", f"{there}.mlp", projections)
    yield _columns(f"{here}.mlp.down.weight", f"{there}.mlp.down_proj.weight", config.hidden, width, mine)
    if config.mlp_bias:
        yield _vector(f"{here}.mlp.down.bias", f"{there}.mlp.down_proj.bias", config.hidden, partition.rank == 0)


def _rows(name: str, module: str, projections: list[tuple[str, int, Range]], columns: int) -> Target:
    whole = Range(0, columns)
    return Target(name, [Part(f"{module}.{p}.weight", (out, columns), rows, whole) for p, out, rows in projections])


def _biases(name: str, module: str, projections: list[tuple[str, int, Range]]) -> Target:
    return Target(name, [Part(f"{module}.{p}.bias", (out,), rows) for p, out, rows in projections])


def _columns(name: str, source: str, rows: int, width: int, columns: Range) -> Target:
    return Target(name, [Part(source, (rows, width), Range(0, rows), columns)])


def _vector(name: str, source: str, size: int, wanted: bool = True) -> Target:
    return Target(name, [Part(source, (size,), Range(0, size))], wanted=wanted)


def _vocabulary(name: str, source: str, config: ModelConfig, partition: Partition) -> Target:
    shape = (config.vocab_size, config.hidden)
    part = Part(source, shape, partition.vocab, Range(0, config.hidden))
    return Target(name, [part], padding=partition.vocab_rows - partition.vocab.size)


def _scaled(heads: Range, size: int) -> Range:
    return Range(heads.start * size, heads.stop * size)
