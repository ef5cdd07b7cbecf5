"""The ``torch`` ops: the reference in torch operators, for any device."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from tpserve.api.ops import Linear, Ops, SamplingBatch
from tpserve.ops import noise
from tpserve.ops.packed import packed_linear

__all__ = ["TorchOps"]

_CANDIDATES = 1024
"""How many of the likeliest tokens the filters look at before they sort the whole vocabulary."""

_LEAST_TEMPERATURE = 1e-5
"""Below this the quotient of a logit could overflow, and the draw is greedy anyway."""


class TorchOps(Ops):
    """The reference: plain, and on the CPU as fast as torch operators get."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Bind the weight, packed where that is possible."""
        return packed_linear(weight, bias) or functools.partial(functional.linear, weight=weight, bias=bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm."""
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add into the residual, and norm the sum."""
        residual.add_(x)
        return functional.rms_norm(residual, weight.shape, weight, eps), residual

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_slots: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        """Norm, rotate and store."""
        kv_heads = k_cache.shape[2]
        q_heads = qkv.shape[1] - 2 * kv_heads
        qk = qkv.narrow(1, 0, q_heads + kv_heads)
        if q_norm is not None and k_norm is not None:
            q, k = torch.split(qk.float(), [q_heads, kv_heads], dim=1)
            qk = torch.cat((_head_norm(q, q_norm, eps), _head_norm(k, k_norm, eps)), dim=1)
        rotated = _rotate(qk, cos_sin).to(qkv.dtype)
        _rows(k_cache).index_copy_(0, cache_slots, rotated.narrow(1, q_heads, kv_heads))
        _rows(v_cache).index_copy_(0, cache_slots, qkv.narrow(1, q_heads + kv_heads, kv_heads))
        return rotated.narrow(1, 0, q_heads)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Activate the first half with the second."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Draw one token a row."""
        greedy = logits.argmax(dim=-1)
        if batch.all_greedy:
            return greedy
        scores = logits.float() / batch.temperature.clamp(min=_LEAST_TEMPERATURE).unsqueeze(1)
        if batch.any_filter:
            scores.masked_fill_(scores < _thresholds(scores, batch), -torch.inf)
        scores += noise.gumbel(batch.seed, batch.position, scores.shape[1])
        return torch.where(batch.temperature == 0, greedy, scores.argmax(dim=-1))


def _head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight.float(), eps)


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2): float32 ``[tokens, heads, head_dim]``."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """A cache as one row a token: ``[pages * page_size, kv_heads, head_dim]``."""
    return cache.flatten(0, 1)


def _thresholds(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The least score that each row's filters keep: float32 ``[n, 1]`` for ``scores`` float32 ``[n, vocabulary]``.

    Nearly always the likeliest tokens decide this alone; only rows where they do not are sorted whole. Which these are,
    a GPU would have to be asked, and all that is under way waited for: there every row is sorted whole.
    """
    filters = [each.unsqueeze(1) for each in (batch.top_k, batch.top_p, batch.min_p)]
    vocabulary = scores.shape[1]
    if vocabulary <= _CANDIDATES or scores.is_cuda:
        return _thresholds_from(scores, vocabulary, *filters)[0]
    threshold, decided = _thresholds_from(scores, _CANDIDATES, *filters)
    rest = (~decided).nonzero()[:, 0]
    if len(rest):
        threshold[rest] = _thresholds_from(scores[rest], vocabulary, *(each[rest] for each in filters))[0]
    return threshold


def _thresholds_from(
    scores: torch.Tensor, count: int, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The thresholds as far as the ``count`` largest scores show them, and the rows ``[n]`` where that is the truth."""
    top = scores.topk(count, dim=1).values
    largest = top[:, :1]
    kth = top.gather(1, (top_k.long() - 1).clamp_(0, count - 1))
    kth = torch.where(top_k > 0, kth, -torch.inf)

    total = (scores - largest).exp_().masked_fill_(scores < kth, 0).sum(dim=1, keepdim=True)
    weights = (top - largest).exp_().masked_fill_(top < kth, 0)
    sums = weights.cumsum(dim=1)
    last = ((sums - weights) < top_p * total).sum(dim=1, keepdim=True) - 1
    nucleus = torch.where(top_p < 1, top.gather(1, last.clamp_(min=0)), -torch.inf)

    threshold = torch.maximum(torch.maximum(kth, nucleus), largest + min_p.log())
    decided = (top_k <= count) & ((top_p >= 1) | (sums[:, -1:] >= top_p * total))
    return threshold, decided.squeeze(1)
