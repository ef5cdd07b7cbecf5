"""The ops: FlashInfer's kernels for norms, rotation, the KV store and the activation.

Products are torch's. So are draws: FlashInfer's samplers have random numbers of their own, and what a row draws must
follow from its seed and position alone.
"""

from __future__ import annotations

import torch
from flashinfer import activation, norm, page, rope
from flashinfer.jit.activation import gen_act_and_mul_module
from flashinfer.jit.norm import gen_norm_module
from flashinfer.jit.page import gen_page_module
from flashinfer.jit.rope import gen_rope_module

from tpserve.api import Options
from tpserve.ops.reference import TorchOps
from tpserve_attn_flashinfer.compiling import compile_modules

__all__ = ["FlashInferOps"]

_DTYPES = (torch.bfloat16, torch.float16)

_HEAD_DIMS = (64, 128, 256)

_ALIGNED = 16
"""Bytes at whose multiples rows must begin for an activation."""


class FlashInferOps(TorchOps):
    """FlashInfer's kernels, and torch's operators for dtypes and sizes that those do not have.

    All launches may be held by CUDA graphs, once the largest step has run.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._counted = _Counted(0, torch.device("cpu"))
        modules = [gen_norm_module(), gen_rope_module(), gen_page_module(), gen_act_and_mul_module("silu")]
        compile_modules("norms, rotation, store and activation", modules)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm."""
        if x.dtype not in _DTYPES:
            return super().rms_norm(x, weight, eps)
        normed: torch.Tensor = norm.rmsnorm(x, weight, eps, out=torch.empty_like(x))
        return normed

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add into the residual, and norm the sum into ``x``."""
        if x.dtype not in _DTYPES:
            return super().add_rms_norm(x, residual, weight, eps)
        norm.fused_add_rmsnorm(x, residual, weight, eps)
        return x, residual

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
        """Norm, rotate and store, in two to four launches."""
        tokens, heads, head_dim = qkv.shape
        if qkv.dtype not in _DTYPES or head_dim not in _HEAD_DIMS:
            return super().rotate_and_store(qkv, cos_sin, k_cache, v_cache, cache_slots, q_norm, k_norm, eps)
        kv_heads = k_cache.shape[2]
        q, k, v = torch.split(qkv, [heads - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            for part, weight in ((q, q_norm), (k, k_norm)):
                norm.rmsnorm(part, weight, eps, out=part)
        counted = self._count(tokens, qkv.device)
        places = counted.places[:tokens]
        rope.apply_rope_with_cos_sin_cache_inplace(places, q, k, head_dim, cos_sin)
        # To FlashInfer the tokens of a step are one sequence, whose pages have room for a token each.
        page.append_paged_kv_cache(
            k,
            v,
            counted.zeros[:tokens],
            places,
            (k_cache.flatten(0, 1).unsqueeze(1), v_cache.flatten(0, 1).unsqueeze(1)),
            cache_slots.int(),
            counted.zeros[:2],
            counted.zeros[:1],
        )
        return q

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Activate the first half with the second."""
        size = gate_up.shape[1] // 2
        if gate_up.dtype not in _DTYPES or size * gate_up.itemsize % _ALIGNED:
            return super().silu_and_mul(gate_up)
        activated: torch.Tensor = activation.silu_and_mul(gate_up.contiguous())
        return activated

    def _count(self, tokens: int, device: torch.device) -> _Counted:
        """Numbers for so many tokens: those that are there, unless there are too few."""
        counted = self._counted
        if counted.places.device == device and len(counted.places) >= tokens:
            return counted
        counted = _Counted(tokens, device)
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._counted = counted  # what a graph makes is there for that graph alone
        return counted


class _Counted:
    """What is the same in every step.

    Attributes:
        places: 0 … tokens - 1, int32.
        zeros: at least two, int32.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.places = torch.arange(tokens, dtype=torch.int32, device=device)
        self.zeros = torch.zeros(max(tokens, 2), dtype=torch.int32, device=device)
