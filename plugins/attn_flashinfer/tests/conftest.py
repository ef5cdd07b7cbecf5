"""Without FlashInfer, an imitation of the part of it that is used: the same arguments, computed by definition."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Prefill:
    """Any number of new tokens a sequence."""

    def __init__(self, workspace: torch.Tensor, *, backend: str) -> None:
        assert backend == "fa2"

    def reset_workspace_buffer(self, workspace: torch.Tensor, numbers: torch.Tensor) -> None:
        assert workspace.dtype == numbers.dtype == torch.uint8

    def plan(
        self, query_starts: Any, starts: Any, pages: Any, last_lens: Any, *sizes: int, causal: bool, **formula: Any
    ) -> None:
        assert causal
        assert len(pages) == starts[-1]
        self.tensors = [query_starts.clone(), starts.clone(), pages, last_lens.clone()]
        self.sizes, self.formula = sizes, formula

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        q_heads, kv_heads, head_dim, page_size = self.sizes
        assert tuple(query.shape[1:]) == (q_heads, head_dim)
        assert tuple(cache[0].shape[1:]) == (page_size, kv_heads, head_dim)
        query_starts, starts, pages, last_lens = self.tensors
        for i, last in enumerate(last_lens.tolist()):
            mine = pages[starts[i] : starts[i + 1]].long()
            length = (len(mine) - 1) * page_size + last
            keys, values = (each[mine].flatten(0, 1)[:length].double() for each in cache)
            rows = slice(query_starts[i], query_starts[i + 1])
            out[rows] = self.attend(query[rows].double(), keys, values).to(out.dtype)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,thd->hqt", query, keys) * self.formula["sm_scale"]
        if cap := self.formula["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        back = torch.arange(len(keys) - len(query), len(keys)).unsqueeze(1) - torch.arange(len(keys))
        window = self.formula["window_left"]
        hidden = (back < 0) | ((back > window) if window >= 0 else False)
        values = values.masked_fill(
            hidden.all(0)[:, None, None], 0
        )  # NaN there does not matter to FlashInfer's kernels
        return torch.einsum("hqt,thd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(2), values)


class Decode(Prefill):
    """One new token a sequence; a graph holds the buffers."""

    def __init__(self, workspace: torch.Tensor, *, use_cuda_graph: bool, backend: str, **buffers: Any) -> None:
        super().__init__(workspace, backend=backend)
        assert use_cuda_graph
        assert buffers["use_tensor_cores"]
        starts, pages, last_lens = (
            buffers[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")
        )
        self.tensors = [torch.arange(len(starts)), starts, pages, last_lens]

    def plan(self, starts: Any, pages: Any, last_lens: Any, *sizes: int, **formula: Any) -> None:  # type: ignore[override]
        assert len(pages) == starts[-1]
        for buffer, given in zip(self.tensors[1:], (starts, pages, last_lens), strict=True):
            buffer[: len(given)].copy_(given)
        self.sizes, self.formula = sizes, formula


def fast_decode_plan(
    wrapper: Decode,
    starts: torch.Tensor,
    pages: torch.Tensor,
    last_lens: torch.Tensor,
    *sizes: int,
    global_override_indptr_cpu: torch.Tensor,
    **formula: Any,
) -> None:
    """Writes no buffer."""
    assert global_override_indptr_cpu is starts
    assert (wrapper.sizes, wrapper.formula) == (sizes, formula)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor) -> torch.Tensor:
    assert x.dtype == weight.dtype == out.dtype != torch.float32
    wide = x.float()
    return out.copy_(wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float())


def fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    rmsnorm(residual.add_(x), weight, eps, out=x)


def apply_rope(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_dim: int, cos_sin: torch.Tensor
) -> None:
    assert head_dim in (64, 128, 256)
    assert positions.dtype == torch.int32
    assert positions.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert cos_sin.is_contiguous()
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    for part in (query, key):
        first, second = part.float().chunk(2, dim=-1)
        part.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def append_paged_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    starts: torch.Tensor,
    last_lens: torch.Tensor,
) -> None:
    numbers = (sequences, positions, pages, starts, last_lens)
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in numbers)
    assert len(starts) == len(last_lens) + 1
    assert len(sequences) == len(positions) == len(k)
    page_size = caches[0].shape[1]
    where = pages[starts[sequences.long()] + positions // page_size].long(), (positions % page_size).long()
    for cache, new in zip(caches, (k, v), strict=True):
        assert cache.shape[2:] == new.shape[1:]
        cache[where] = new


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    assert gate.shape[-1] * x.itemsize % 16 == 0
    assert x.is_contiguous()
    return (gate * gate.sigmoid() * up).to(x.dtype)


PARTS: dict[str, dict[str, Any]] = {
    "norm": {"rmsnorm": rmsnorm, "fused_add_rmsnorm": fused_add_rmsnorm},
    "rope": {"apply_rope_with_cos_sin_cache_inplace": apply_rope},
    "page": {"append_paged_kv_cache": append_paged_kv_cache},
    "activation": {"silu_and_mul": silu_and_mul},
}


def imitation() -> dict[str, ModuleType]:
    flashinfer, jit = ModuleType("flashinfer"), ModuleType("flashinfer.jit")
    found = {"flashinfer": flashinfer, "flashinfer.jit": jit}
    for name, functions in PARTS.items():
        found[f"flashinfer.{name}"] = part = ModuleType(name)
        vars(part).update(functions)
        setattr(flashinfer, name, part)
        found[f"flashinfer.jit.{name}"] = generator = ModuleType(name)
        made = "gen_act_and_mul_module" if name == "activation" else f"gen_{name}_module"
        setattr(generator, made, lambda *key: SimpleNamespace(is_aot=True))
    vars(flashinfer).update(
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        fast_decode_plan=fast_decode_plan,
    )
    vars(jit).update(gen_batch_prefill_module=lambda *key: SimpleNamespace(is_aot=True))
    return found


if importlib.util.find_spec("flashinfer") is None:
    with_it = imitation()
    sys.modules.update(with_it)
    try:
        importlib.import_module("tpserve_attn_flashinfer.attention")
        importlib.import_module("tpserve_attn_flashinfer.ops")
    finally:
        for name in with_it:
            del sys.modules[name]
