"""Products with a bound weight: which kernel multiplies, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from tpserve_attn_triton.device import device_of, power_of_two
from tpserve_attn_triton.products import MOST_ROWS, matvec, narrow, wide
from tpserve_attn_triton.shapes import WIDE_ROWS, Block, choose_blocks, choose_parts, choose_wide, prefers_light
from tpserve_attn_triton.steps import silu_and_mul

__all__ = ["Product", "activate"]

_ACTIVATED = 1024
"""Columns that a program activates."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a weight ``[out, in]``; see :mod:`tpserve_attn_triton.products`.

    Attributes:
        gated: it is activated.
        in_parts: it may be ``[parts, n, out]``, which whatever follows adds up; it has no bias.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    gated: bool
    in_parts: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``[n, in]``."""
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
        return activate(product) if self.gated else product

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
        if not fits or not device_of(x.device).tiles:
            return None
        return choose_wide(out, columns, _room(n), gated=self.gated)

    def _launch(self, x: torch.Tensor, n: int, block: Block) -> torch.Tensor:
        device = device_of(x.device)
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


def activate(gate_up: torch.Tensor) -> torch.Tensor:
    """The silu of the first half of ``[n, 2 size]`` times the second."""
    gate_up, device = gate_up.contiguous(), device_of(gate_up.device)
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(n, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(power_of_two(size), _ACTIVATED)
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
