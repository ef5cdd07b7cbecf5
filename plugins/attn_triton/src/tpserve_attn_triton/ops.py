"""The ops: how their kernels are launched; those of products in :mod:`tpserve_attn_triton.linear`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpserve.api import Linear, Ops, Options, SamplingBatch
from tpserve_attn_triton.device import Device, device_of, power_of_two
from tpserve_attn_triton.filters import restrict, survey
from tpserve_attn_triton.linear import activate, bind
from tpserve_attn_triton.products import MOST_ROWS
from tpserve_attn_triton.sampling import draw, settle
from tpserve_attn_triton.steps import rms_norm, rotate_and_store

__all__ = ["TritonOps"]

_HEADS = 8
"""Heads that a program rotates."""

_DRAWN = 2048
"""Logits at a time of a program that draws."""

_DRAWING = 16
"""Programs that draw, for each multiprocessor, at the most."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the filters divide a row.

    Attributes:
        size: tokens of a tile.
        most: tiles that are looked at first, at the most.
        rows: tiles at a time.
    """

    size: int = 64
    most: int = 128
    rows: int = 64


class TritonOps(Ops):
    """Each step is one launch, a draw two, with filters four; none waits for the device, and CUDA graphs may hold all.

    Kernels are compiled for dtypes, the model's shape, and whether a batch is filtered, and for one row, 16, 32, 64,
    128, 384 or more, and some of those in between: once each step has run with 1, 2, 17, 33, 65, 193 and 385 rows, and
    a draw has been filtered and not, nothing is left to compile.

    Weights should be written well before the first product with them, not by the kernel just before: their first block
    may be read before that one has ended.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._tiles = Tiles()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Bind the weight: kernels of our own for few rows, torch's above.

        A row's result is the same bits in any batch of 2 to 16, if the dtype has two bytes and the weight is no large
        vocabulary's, and in any of those that share a kernel of ``wide``; alone, and in other batches, it may be
        rounded otherwise.
        """
        return bind(weight, bias)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """As :meth:`linear`, with the activation in the same kernel for few rows."""
        return bind(weight, bias, gated=True)

    def linear_in_parts(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """As :meth:`linear`, but in parts where the weight has too few rows for all multiprocessors."""
        return bind(weight, bias, in_parts=True)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm."""
        x = x.contiguous()
        return _norm(x, x, weight, eps, torch.empty_like(x), add=False)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add into the residual, and norm the sum into ``x``, or into its first part."""
        x, residual = x.contiguous(), residual.contiguous()
        return _norm(x, residual, weight, eps, x if x.dim() == 2 else x[0], add=True), residual

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
        """Norm, rotate and store, and add up the parts of ``qkv`` before."""
        qkv, device = qkv.contiguous(), device_of(qkv.device)
        tokens, heads, head_dim = qkv.shape[-3:]
        parts = qkv.shape[0] if qkv.dim() > 3 else 1
        kv_heads = k_cache.shape[2]
        q = torch.empty(tokens, heads - 2 * kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        rotate_and_store[(tokens, -(-heads // _HEADS))](
            qkv,
            cos_sin.contiguous(),
            k_cache,
            v_cache,
            cache_slots,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            q,
            eps,
            qkv.stride(0) if parts > 1 else 0,
            Q_HEADS=q.shape[1],
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            COLUMNS=power_of_two(head_dim // 2),
            HEADS=_HEADS,
            NORMED=q_norm is not None,
            PARTS=parts,
            OVERLAP=device.overlap,
            num_warps=4,
            **device.options(after_ours=tokens <= MOST_ROWS),
        )
        return q

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Activate the first half, multiply with the second."""
        return activate(gate_up)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Draw one token a row."""
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        n, vocabulary = logits.shape
        device = device_of(logits.device)
        filtered = batch.any_filter and not batch.all_greedy
        thresholds = self._thresholds(logits, batch, device) if filtered else batch.temperature
        blocks = -(-vocabulary // _DRAWN)
        most = max(1, _DRAWING * device.processors // max(1, n))
        each = -(-blocks // min(blocks, most))
        parts = -(-blocks // each)
        scores = torch.empty(n, parts, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(n, parts, dtype=torch.int32, device=logits.device)
        draw[(n, parts)](
            logits,
            batch.temperature,
            batch.seed,
            batch.position,
            thresholds,
            scores,
            tokens,
            logits.stride(0),
            each,
            VOCABULARY=vocabulary,
            BLOCK=_DRAWN,
            FILTERED=filtered,
            OVERLAP=device.overlap,
            NATIVE=logits.is_cuda,
            num_warps=4,
            **device.options(after_ours=filtered or n == 1),
        )
        drawn = torch.empty(n, dtype=torch.int64, device=logits.device)
        settle[(n,)](
            scores,
            tokens,
            drawn,
            parts,
            ROOM=power_of_two(blocks),
            OVERLAP=device.overlap,
            num_warps=1,
            **device.options(),
        )
        return drawn

    def _thresholds(self, logits: torch.Tensor, batch: SamplingBatch, device: Device) -> torch.Tensor:
        """The least logit of each row that its filters keep: float32 ``[n]``."""
        n, vocabulary = logits.shape
        tiles = self._tiles
        count = -(-vocabulary // tiles.size)
        peaks = torch.empty(n, count, dtype=torch.float32, device=logits.device)
        weights = torch.empty_like(peaks)
        thresholds = torch.empty(n, dtype=torch.float32, device=logits.device)
        chosen = torch.empty(n, tiles.most, dtype=torch.int32, device=logits.device)
        filters = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
        survey[(n, -(-count // tiles.rows))](
            logits,
            *filters,
            peaks,
            weights,
            logits.stride(0),
            VOCABULARY=vocabulary,
            TILES=count,
            TILE=tiles.size,
            ROWS=tiles.rows,
            OVERLAP=device.overlap,
            num_warps=8,
            **device.options(after_ours=n == 1),
        )
        restrict[(n,)](
            logits,
            *filters,
            peaks,
            weights,
            chosen,
            thresholds,
            logits.stride(0),
            VOCABULARY=vocabulary,
            TILES=count,
            TILE=tiles.size,
            ROWS=tiles.rows,
            ROOM=power_of_two(count),
            MOST=tiles.most,
            OVERLAP=device.overlap,
            num_warps=16,
            **device.options(),
        )
        return thresholds


def _norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, add: bool
) -> torch.Tensor:
    device = device_of(x.device)
    hidden = x.shape[-1]
    rows, columns = out.numel() // hidden, power_of_two(hidden)
    parts = x.numel() // out.numel() if rows else 1
    rms_norm[(rows,)](
        x,
        residual,
        weight,
        out,
        eps,
        out.numel() if parts > 1 else 0,
        HIDDEN=hidden,
        COLUMNS=columns,
        ADD=add,
        PARTS=parts,
        OVERLAP=device.overlap,
        num_warps=min(max(columns // 256, 1), 16),
        **device.options(after_ours=rows <= MOST_ROWS),
    )
    return out
