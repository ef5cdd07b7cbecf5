"""The ops: how their kernels are launched."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from tpserve.api import Linear, Ops, Options, SamplingBatch
from tpserve_attn_triton.filters import restrict, survey
from tpserve_attn_triton.products import MOST_ROWS, matvec, narrow, wide
from tpserve_attn_triton.sampling import draw, settle
from tpserve_attn_triton.shapes import WIDE_ROWS, Block, choose_blocks, choose_parts, choose_wide, prefers_light
from tpserve_attn_triton.steps import rms_norm, rotate_and_store, silu_and_mul

__all__ = ["TritonOps"]

_HEADS = 8
"""Heads that a program rotates."""

_ACTIVATED = 1024
"""Columns that a program activates."""

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


@dataclass(frozen=True, slots=True)
class _Device:
    """What launches depend on.

    Attributes:
        processors: multiprocessors.
        overlap: a kernel may be launched while the one before still runs.
        tiles: ``wide`` finds its copy engine and room, and was measured.
    """

    processors: int
    overlap: bool
    tiles: bool

    def options(self, *, after_ours: bool = True) -> dict[str, Any]:
        """For a launch; ``after_ours`` that of a kernel which says when the next may be launched.

        cuBLAS's do not, and who waits for one that way begins half a microsecond later than who does not.
        """
        return {"launch_pdl": True} if self.overlap and after_ours else {}


@functools.cache
def _device(device: torch.device) -> _Device:
    if device.type != "cuda":
        return _Device(4, overlap=False, tiles=True)
    properties = torch.cuda.get_device_properties(device)
    return _Device(properties.multi_processor_count, overlap=properties.major >= 9, tiles=properties.major == 9)


class TritonOps(Ops):
    """Each step is one launch, a draw two, with filters four; none waits for the device, and CUDA graphs may hold all.

    Kernels are compiled for dtypes, the model's shape, and whether a batch is filtered, and for one row, 16, 32, 64,
    384 or more: once each step has run with 1, 2, 17, 33, 65 and 385 rows, and a draw has been filtered and not,
    nothing is left to compile.

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
        return _Product(weight.contiguous(), bias, gated=False)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """As :meth:`linear`, with the activation in the same kernel for few rows."""
        return _Product(weight.contiguous(), bias, gated=True)

    def linear_in_parts(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """As :meth:`linear`, but in two parts where torch would otherwise divide the sum itself."""
        return _Product(weight.contiguous(), bias, gated=False, in_parts=bias is None)

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
        """Norm, rotate and store."""
        qkv, device = qkv.contiguous(), _device(qkv.device)
        tokens, heads, head_dim = qkv.shape
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
            Q_HEADS=q.shape[1],
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            COLUMNS=_power_of_two(head_dim // 2),
            HEADS=_HEADS,
            NORMED=q_norm is not None,
            OVERLAP=device.overlap,
            num_warps=4,
            **device.options(after_ours=tokens <= MOST_ROWS),
        )
        return q

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Activate the first half, multiply with the second."""
        return _activate(gate_up)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Draw one token a row."""
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        n, vocabulary = logits.shape
        device = _device(logits.device)
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
            ROOM=_power_of_two(blocks),
            OVERLAP=device.overlap,
            num_warps=1,
            **device.options(),
        )
        return drawn

    def _thresholds(self, logits: torch.Tensor, batch: SamplingBatch, device: _Device) -> torch.Tensor:
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
            ROOM=_power_of_two(count),
            MOST=tiles.most,
            OVERLAP=device.overlap,
            num_warps=16,
            **device.options(),
        )
        return thresholds


@dataclass(frozen=True, slots=True)
class _Product:
    """A product with a weight ``[out, in]``; see :mod:`tpserve_attn_triton.products`.

    Attributes:
        gated: it is activated.
        in_parts: it may be ``[parts, n, out]``, and has no bias.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    gated: bool
    in_parts: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n and (block := self._block(x, n)) is not None:
            return self._launch(x.contiguous(), n, block)
        out, columns = self.weight.shape
        if self.in_parts and self.weight.itemsize == 2 and (parts := choose_parts(out, columns, n)) > 1:
            each = columns // parts
            return torch.bmm(
                x.reshape(n, parts, each).transpose(0, 1), self.weight.view(out, parts, each).permute(1, 2, 0)
            )
        product = _multiply(x, self.weight, self.bias)
        return _activate(product) if self.gated else product

    def _block(self, x: torch.Tensor, n: int) -> Block | None:
        """Of the kernel of our own; None where torch's is as fast, or ours cannot be."""
        out, columns = self.weight.shape
        blocks = choose_blocks(out, columns)
        if n == 1:
            return blocks.one
        if n > WIDE_ROWS[-1] or self.weight.itemsize != 2:
            return None
        if n <= MOST_ROWS:
            return blocks.few
        # What the copy engine asks for.
        fits = columns % 8 == 0 and x.data_ptr() % 16 == 0 and self.weight.data_ptr() % 16 == 0
        if not fits or not _device(x.device).tiles:
            return None
        return choose_wide(out, columns, _room(n), gated=self.gated)

    def _launch(self, x: torch.Tensor, n: int, block: Block) -> torch.Tensor:
        device = _device(x.device)
        weight, (rows, columns) = self.weight, self.weight.shape
        out = torch.empty(n, rows // 2 if self.gated else rows, dtype=x.dtype, device=x.device)
        bias = weight if self.bias is None else self.bias
        options = {
            "OUT": out.shape[1],
            "IN": columns,
            "BLOCK": block.rows,
            "COLUMNS": block.columns,
            "GATED": self.gated,
            "BIASED": self.bias is not None,
            "OVERLAP": device.overlap,
            "num_warps": block.warps,
            "num_stages": block.stages,
            **device.options(),
        }
        grid = (-(-rows // block.rows),)
        if n == 1:
            matvec[grid](x, weight, bias, out, **options)
        elif n <= MOST_ROWS:
            narrow[grid](x, weight, bias, out, n, PARTS=block.warps, WIDE=not x.is_cuda, **options)
        else:
            room, lines = _room(n), block.rows // 2 if self.gated else block.rows
            tiles = TensorDescriptor.from_tensor(weight, [lines, block.columns])
            rows_of_x = TensorDescriptor.from_tensor(x, [room, block.columns])
            wide[grid](rows_of_x, tiles, bias, out, n, ROWS=room, WIDE=not x.is_cuda, **options)
        return out


def _room(n: int) -> int:
    """Rows that the kernel is compiled for which multiplies ``n``."""
    return next(rows for rows in WIDE_ROWS if n <= rows)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Torch's product, by the library that is faster."""
    out, columns = weight.shape
    if not (x.is_cuda and prefers_light(out, columns, x.shape[0])):
        return functional.linear(x, weight, bias)
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return functional.linear(x, weight, bias)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, add: bool
) -> torch.Tensor:
    device = _device(x.device)
    hidden = x.shape[-1]
    rows, columns = out.numel() // hidden, _power_of_two(hidden)
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


def _activate(gate_up: torch.Tensor) -> torch.Tensor:
    gate_up, device = gate_up.contiguous(), _device(gate_up.device)
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(n, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(_power_of_two(size), _ACTIVATED)
    silu_and_mul[(n, -(-size // block))](
        gate_up,
        out,
        SIZE=size,
        BLOCK=block,
        OVERLAP=device.overlap,
        num_warps=4,
        **device.options(after_ours=n <= MOST_ROWS),
    )
    return out


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
