"""Products with a bound weight: which kernel multiplies, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from tpserve_attn_triton.device import device_of, power_of_two
from tpserve_attn_triton.products import MOST_ROWS, matvec, narrow, wide
from tpserve_attn_triton.shapes import WIDE_ROWS, Block, choose_blocks, choose_parts, choose_wide, is_turned
from tpserve_attn_triton.steps import silu_and_mul

__all__ = ["Product", "activate", "bind"]

_ACTIVATED = 1024
"""Columns that a program activates."""


def bind(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False, in_parts: bool = False
) -> Product:
    """Prepare a product with ``weight`` ``[out, in]``."""
    out, columns = weight.shape
    in_parts = in_parts and bias is None
    readable = device_of(weight.device).tiles and weight.itemsize == 2 and columns % 8 == 0
    turned = readable and (gated or in_parts) and is_turned(out, columns)
    kept = weight.t().contiguous() if turned else weight.contiguous()
    return Product(kept, bias, gated, in_parts, readable and kept.data_ptr() % 16 == 0, turned)


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a weight ``[out, in]``; see :mod:`tpserve_attn_triton.products`.

    Attributes:
        weight: ``[out, in]``, or ``[in, out]`` if it is turned.
        gated: it is activated.
        in_parts: it may be ``[parts, n, out]``, which whatever follows adds up; it has no bias.
        tiled: the copy engine can read the weight.
        turned: the weight is; then it is gated or may be in parts.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    gated: bool
    in_parts: bool
    tiled: bool
    turned: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``[n, in]``."""
        x = x.contiguous()
        if x.shape[0] == 0:
            return self._multiply(x)
        if (block := self._tile(x)) is not None:
            return self._launch_tiles(x, block)
        if (block := self._block(x.shape[0])) is not None:
            return self._launch(x, block)
        return self._multiply(x)

    def _tile(self, x: torch.Tensor) -> Block | None:
        """The block of ``wide``; None where another way is as fast, or the copy engine cannot read what it needs."""
        n = x.shape[0]
        if not self.tiled or n > WIDE_ROWS[-1] or (n == 1 and not self.turned) or x.data_ptr() % 16:
            return None
        return choose_wide(*self._shape(), _room(n), gated=self.gated, in_parts=self.in_parts, turned=self.turned)

    def _block(self, n: int) -> Block | None:
        """The block of ``matvec`` or ``narrow``; None where torch's product is as fast, or those cannot be."""
        if self.turned or n > MOST_ROWS or (n > 1 and self.weight.itemsize != 2):
            return None
        blocks = choose_blocks(*self._shape())
        return blocks.one if n == 1 else blocks.few

    def _launch(self, x: torch.Tensor, block: Block) -> torch.Tensor:
        n, (rows, columns) = x.shape[0], self._shape()
        out = torch.empty(n, rows // 2 if self.gated else rows, dtype=x.dtype, device=x.device)
        options = self._options(block) | {"OUT": out.shape[1], "IN": columns}
        arguments = x, self.weight, self._bias(), out
        grid = (-(-rows // block.rows),)
        if n == 1:
            matvec[grid](*arguments, **options)
        else:
            narrow[grid](*arguments, n, PARTS=block.warps, WIDE=not x.is_cuda, **options)
        return out

    def _launch_tiles(self, x: torch.Tensor, block: Block) -> torch.Tensor:
        n, (rows, columns) = x.shape[0], self._shape()
        lines = block.rows // 2 if self.gated else block.rows
        size = [block.columns, lines] if self.turned else [lines, block.columns]
        share = -(-columns // (block.parts * block.columns)) * block.columns
        out = torch.empty(block.parts, n, rows // 2 if self.gated else rows, dtype=x.dtype, device=x.device)
        wide[-(-rows // block.rows), block.parts](
            TensorDescriptor.from_tensor(x, [_room(n), block.columns]),
            TensorDescriptor.from_tensor(self.weight, size),
            self._bias(),
            out,
            n,
            out.shape[-1],
            columns,
            share,
            ROWS=_room(n),
            TURNED=self.turned,
            WIDE=not x.is_cuda,
            **self._options(block),
        )
        return out if self.in_parts else out[0]

    def _options(self, block: Block) -> dict[str, Any]:
        """What all launches have in common."""
        device = device_of(self.weight.device)
        return {
            "BLOCK": block.rows,
            "COLUMNS": block.columns,
            "GATED": self.gated,
            "BIASED": self.bias is not None,
            "OVERLAP": device.overlap,
            "num_warps": block.warps,
            "num_stages": block.stages,
            **device.options(),
        }

    def _bias(self) -> torch.Tensor:
        """Something for kernels that take one."""
        return self.weight if self.bias is None else self.bias

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        """By torch."""
        n, (out, columns) = x.shape[0], self._shape()
        weight = self.weight.t() if self.turned else self.weight
        if self.in_parts and weight.itemsize == 2 and (parts := choose_parts(out, columns, n)) > 1:
            each = columns // parts
            return torch.bmm(x.view(n, parts, each).transpose(0, 1), weight.t().view(parts, each, out))
        product = functional.linear(x, weight, self.bias)
        return activate(product) if self.gated else product

    def _shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        first, second = self.weight.shape
        return (second, first) if self.turned else (first, second)


def _room(n: int) -> int:
    """Rows that the kernel is compiled for which multiplies ``n``."""
    return next(rows for rows in WIDE_ROWS if n <= rows)


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
