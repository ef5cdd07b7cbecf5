"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3), one rank's share, over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tpserve.api import Attention, Comm, Linear, Ops
from tpserve.distributed.partition import Partition
from tpserve.models.config import ModelConfig
from tpserve.models.rope import rotary_table

__all__ = ["Decoder", "Layer", "LayerCache"]

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""One layer's keys and values, each ``[pages, page_size, kv_heads, head_dim]``."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; ``gate_up`` activates too, ``o`` and ``down`` give partial sums over the ranks."""

    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    next_norm: torch.Tensor
    """The norm that follows the layer: of the next layer's attention, or the last one before the head."""


class Decoder:
    """Computes hidden states and logits; holds weights and nothing of any request.

    Args:
        config: the model's shape.
        partition: this rank's share of it.
        weights: named as :mod:`tpserve.weights.loader` says; taken out of the dictionary, so that those which ``ops``
            repacks do not stay.
        ops: computes the steps of a layer.
        attention: planned by the caller before each :meth:`forward`.
        comm: sums over the ranks; None for one rank.
        max_context: positions to prepare for.
    """

    def __init__(
        self,
        config: ModelConfig,
        partition: Partition,
        weights: dict[str, torch.Tensor],
        ops: Ops,
        attention: Attention,
        comm: Comm | None,
        max_context: int,
    ) -> None:
        self.config = config
        self._partition = partition
        self._ops = ops
        self._attention = attention
        self._comm = comm
        self._embedding = weights.pop("embed.weight")
        self._first_norm = weights.pop("layers.0.attn_norm.weight")
        # Of parts, ranks would have to add up each.
        add_up = ops.linear_in_parts if comm is None else ops.linear
        self._layers = [_take_layer(weights, n, config, ops, add_up) for n in range(config.layers)]
        self._head = ops.linear(weights.pop("head.weight"))
        self._cos_sin = rotary_table(config.rope, config.head_dim, max_context, str(self._embedding.device))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache_slots: torch.Tensor,
        caches: Sequence[LayerCache],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute tokens and store their keys and values.

        Args:
            tokens: int32 or int64 ``[n]``, token ids.
            positions: int64 ``[n]``.
            cache_slots: int64 ``[n]``: where each token's key and value go, page * page_size + offset.
            caches: of each layer.
            rows: int64 ``[m]``: the tokens whose hidden states are wanted; None: all. Of others the last layer computes
                no more than what goes into the cache.

        Returns:
            ``[m, hidden]``: hidden states after the last norm.
        """
        ops, eps = self._ops, self.config.rms_eps
        cos_sin = self._cos_sin[positions]
        residual = self._embed(tokens)
        x = ops.rms_norm(residual, self._first_norm, eps)
        for layer, (k_cache, v_cache) in zip(self._layers, caches, strict=True):
            qkv = layer.qkv(x)
            qkv = qkv.view(*qkv.shape[:-1], -1, self.config.head_dim)
            q = ops.rotate_and_store(qkv, cos_sin, k_cache, v_cache, cache_slots, layer.q_norm, layer.k_norm, eps)
            attended = self._attention.run(q, k_cache, v_cache).flatten(1)
            if rows is not None and layer is self._layers[-1]:
                attended, residual = attended[rows], residual[rows]
            x = self._sum(layer.o(attended))
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self._sum(layer.down(layer.gate_up(x)))
            x, residual = ops.add_rms_norm(x, residual, layer.next_norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of rows of :meth:`forward`'s result, the same bits on every rank: ``[n, vocab_size]``."""
        logits = self._head(hidden)
        if self._comm is not None:
            logits = self._comm.all_gather(logits)
        return logits[:, : self.config.vocab_size]

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._comm is None:
            return functional.embedding(tokens, self._embedding)
        rows = self._partition.vocab_rows
        local = tokens - self._partition.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = functional.embedding(local.masked_fill_(elsewhere, 0), self._embedding)
        return self._comm.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial if self._comm is None else self._comm.all_reduce(partial)


def _take_layer(
    weights: dict[str, torch.Tensor], number: int, config: ModelConfig, ops: Ops, add_up: Callable[..., Linear]
) -> Layer:
    prefix = f"layers.{number}"
    last = number == config.layers - 1

    def taken(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Only rank 0 has the biases of partial sums.
        return weights.pop(f"{prefix}.{name}.weight"), weights.pop(f"{prefix}.{name}.bias", None)

    return Layer(
        qkv=ops.linear_in_parts(*taken("attn.qkv")),
        q_norm=weights.pop(f"{prefix}.attn.q_norm.weight") if config.qk_norm else None,
        k_norm=weights.pop(f"{prefix}.attn.k_norm.weight") if config.qk_norm else None,
        o=add_up(*taken("attn.o")),
        mlp_norm=weights.pop(f"{prefix}.mlp_norm.weight"),
        gate_up=ops.gated_linear(*taken("mlp.gate_up")),
        down=add_up(*taken("mlp.down")),
        next_norm=weights.pop("norm.weight" if last else f"layers.{number + 1}.attn_norm.weight"),
    )
