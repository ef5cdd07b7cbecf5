"""Attention and ops that break the contract, each in one way."""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch.nn import functional

from tpserve.api import AttentionBatch, AttentionShape, Options, SamplingBatch
from tpserve.attention.reference import TorchAttention
from tpserve.ops import noise
from tpserve.ops.reference import TorchOps


class OwnScale(TorchAttention):
    """Scales as most models do, whatever the shape says."""

    def __init__(self, options: Options, shape: AttentionShape) -> None:
        super().__init__(options, replace(shape, scale=shape.head_dim**-0.5))


class FirstEight(TorchAttention):
    """Computes the first eight sequences of a batch."""

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self._rows = sum(batch.query_lens[:8])

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        out = super().run(query, k_cache, v_cache)
        out[self._rows :] = 0
        return out


class NearSighted(TorchAttention):
    """Sees the last 1,000 tokens of a context."""

    def __init__(self, options: Options, shape: AttentionShape) -> None:
        super().__init__(options, replace(shape, sliding_window=shape.sliding_window or 1000))


class ZeroWeight(TorchAttention):
    """Weighs all cells of the pool that are not seen with 0."""

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return super().run(query, k_cache, v_cache) + 0 * v_cache.sum()


class ZeroWeightBeforeTheWindow(TorchAttention):
    """Weighs what comes before the window with 0."""

    def __init__(self, options: Options, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self._all = TorchAttention(options, replace(shape, sliding_window=0))

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self._all.plan(batch)

    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return super().run(query, k_cache, v_cache) + 0 * self._all.run(query, k_cache, v_cache)


class PeriodicNoise(TorchOps):
    """Has the same noise for every 32,768th token."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        right = noise.gumbel

        def wrong(seed: torch.Tensor, position: torch.Tensor, vocabulary: int) -> torch.Tensor:
            return right(seed, position, vocabulary)[:, torch.arange(vocabulary) % 32_768]

        noise.gumbel = wrong
        try:
            return super().sample(logits, batch)
        finally:
            noise.gumbel = right


class ShortGreedy(TorchOps):
    """Looks for the largest of the first 32,768 logits."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        greedy = logits[:, :32_768].argmax(-1)
        return torch.where(batch.temperature == 0, greedy, super().sample(logits, batch))


class NarrowNorm(TorchOps):
    """Computes norms in the dtype of their input."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


class NarrowSum(NarrowNorm):
    """The same, where it adds."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        added = x + residual
        return self.rms_norm(added, weight, eps), added


class ShortActivation(TorchOps):
    """Activates 68 rows, and leaves others at 0."""

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        out = functional.silu(gate) * up
        out[68:] = 0
        return out


class FirstSeeds(TorchOps):
    """Draws in parts of 256 rows, each with the seeds of the first."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        seed = batch.seed[torch.arange(len(logits)) % 256]
        names = ("temperature", "top_k", "top_p", "min_p", "position", "all_greedy", "any_filter")
        return super().sample(logits, SamplingBatch(seed=seed, **{name: getattr(batch, name) for name in names}))
