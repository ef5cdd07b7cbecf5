"""The ``cpu`` ops: kernels compiled for this machine's processor."""

from __future__ import annotations

import torch
from torch.nn import functional

from tpserve.api import Linear, Options
from tpserve.native.library import DTYPES, Kernels, load_kernels
from tpserve.ops.reference import TorchOps

__all__ = ["CpuOps"]


class CpuOps(TorchOps):
    """Layer steps in compiled kernels, and the reference's sampling.

    A row's result has the same bits alone, in any batch, and with any number of threads.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._kernels = {getattr(torch, name): load_kernels(name) for name in DTYPES}

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Put the weight into panels."""
        return _PanelLinear(self._kernels[weight.dtype], weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm."""
        x = x.contiguous()
        out, size = torch.empty_like(x), weight.shape[0]
        self._kernels[x.dtype].rms_norm(
            x.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps, out.data_ptr(), torch.get_num_threads()
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add into the residual, and norm the sum into ``x``."""
        x, residual, size = x.contiguous(), residual.contiguous(), weight.shape[0]
        self._kernels[x.dtype].add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            x.numel() // size,
            size,
            eps,
            torch.get_num_threads(),
        )
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
        """Norm, rotate and store; the queries stay where they are."""
        qkv, cos_sin = qkv.contiguous(), cos_sin.contiguous()
        tokens, heads, head_dim = qkv.shape
        kv_heads = k_cache.shape[2]
        q_heads = heads - 2 * kv_heads
        self._kernels[qkv.dtype].rotate_and_store(
            qkv.data_ptr(),
            cos_sin.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            cache_slots.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            tokens,
            q_heads,
            kv_heads,
            head_dim,
            torch.get_num_threads(),
        )
        return qkv.narrow(1, 0, q_heads)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Activate the first half with the second."""
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._kernels[gate_up.dtype].silu_and_mul(
            gate_up.data_ptr(), rows, size, out.data_ptr(), torch.get_num_threads()
        )
        return out


class _PanelLinear:
    """A product with a weight whose outputs lie side by side, ``panel_width`` of them to a panel."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._outputs, self._depth = weight.shape
        width = kernels.panel_width
        padded = functional.pad(weight, (0, 0, 0, -self._outputs % width))
        halves = padded.view(-1, 2, width // 2, self._depth)
        order = (0, 3, 1, 2) if weight.dtype == torch.float32 else (0, 3, 2, 1)
        self._panels = halves.permute(order).contiguous()
        self._bias = bias
        self._kernel = kernels.linear
        self._weight_pointers = self._panels.data_ptr(), None if bias is None else bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = len(x)
        out = x.new_empty(rows, self._outputs)
        self._kernel(
            x.data_ptr(),
            x.stride(0),
            rows,
            self._depth,
            *self._weight_pointers,
            out.data_ptr(),
            self._outputs,
            torch.get_num_threads(),
        )
        return out
