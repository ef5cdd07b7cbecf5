"""How one model is split over the ranks of a tensor-parallel group.

Attention is split by contiguous groups of KV heads, the MLP by contiguous ranges of its width; both may be uneven, and
then the first ranks have more. The vocabulary is padded, so that every rank has equally many rows.
"""

from __future__ import annotations

import msgspec

from tpserve.errors import ModelError
from tpserve.models.config import ModelConfig

__all__ = ["Partition", "Range", "possible_sizes"]

_MLP_ALIGNMENT = 16
_VOCAB_ALIGNMENT = 64


class Range(msgspec.Struct, frozen=True):
    """The half-open range ``start`` … ``stop - 1``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.stop - self.start


class Partition(msgspec.Struct, frozen=True):
    """One rank's share of a model.

    Attributes:
        rank: this rank.
        size: ranks in the group.
        q_heads: query heads of this rank.
        kv_heads: KV heads of this rank; with more ranks than KV heads, neighbouring ranks hold the same one.
        mlp: columns of the MLP's width.
        vocab: token ids of this rank; all within the vocabulary, so the last ranks may have fewer or none.
        vocab_rows: rows of this rank's embedding and head, padding included; the same on every rank.
            Rank r's first row is token r * vocab_rows.
    """

    rank: int
    size: int
    q_heads: Range
    kv_heads: Range
    mlp: Range
    vocab: Range
    vocab_rows: int

    @staticmethod
    def of(config: ModelConfig, size: int, rank: int) -> Partition:
        """Rank ``rank``'s share of ``config`` split over ``size`` ranks.

        Raises:
            ModelError: the model cannot be split over so many; the hint names the sizes that can.
        """
        if not _splits(config, size):
            sizes = ", ".join(map(str, possible_sizes(config)))
            raise ModelError(
                f"a model with {config.q_heads} query heads and {config.kv_heads} KV heads cannot be split over "
                f"{size} ranks",
                f"Sizes that can: {sizes}",
            )
        kv_heads = _kv_heads(config, size, rank)
        rows = _round_up(-(-config.vocab_size // size), _VOCAB_ALIGNMENT)
        return Partition(
            rank=rank,
            size=size,
            q_heads=_q_heads(config, size, rank, kv_heads),
            kv_heads=kv_heads,
            mlp=_mlp(config.intermediate, size, rank),
            vocab=Range(min(rank * rows, config.vocab_size), min((rank + 1) * rows, config.vocab_size)),
            vocab_rows=rows,
        )


def possible_sizes(config: ModelConfig, up_to: int = 64) -> list[int]:
    """The sizes ≤ ``up_to`` over which the model can be split, rising."""
    return [size for size in range(1, up_to + 1) if _splits(config, size)]


def _splits(config: ModelConfig, size: int) -> bool:
    if not 1 <= size <= config.intermediate:
        return False
    if size <= config.kv_heads:
        return True
    copies, rest = divmod(size, config.kv_heads)
    return rest == 0 and (config.q_heads // config.kv_heads) % copies == 0


def _kv_heads(config: ModelConfig, size: int, rank: int) -> Range:
    if size <= config.kv_heads:
        return _even(config.kv_heads, size, rank)
    head = rank // (size // config.kv_heads)
    return Range(head, head + 1)


def _q_heads(config: ModelConfig, size: int, rank: int, kv_heads: Range) -> Range:
    group = config.q_heads // config.kv_heads
    if size <= config.kv_heads:
        return Range(kv_heads.start * group, kv_heads.stop * group)
    share = config.q_heads // size
    return Range(rank * share, (rank + 1) * share)


def _mlp(width: int, size: int, rank: int) -> Range:
    """Split in blocks that suit vector units; only the last rank gets a block that is cut short."""
    block = _MLP_ALIGNMENT if width >= _MLP_ALIGNMENT * size else 1
    blocks = _even(-(-width // block), size, rank)
    return Range(blocks.start * block, min(blocks.stop * block, width))


def _even(count: int, size: int, rank: int) -> Range:
    """Contiguous ranges that differ by at most one, larger ones first."""
    share, larger = divmod(count, size)
    start = rank * share + min(rank, larger)
    return Range(start, start + share + (rank < larger))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
