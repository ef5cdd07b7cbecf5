"""What tpserve reads of this package; it imports neither torch nor flashinfer."""

from __future__ import annotations

from tpserve.api import AttentionCapabilities, AttentionSpec, OpsCapabilities, OpsSpec, hookimpl
from tpserve.api.cuda import no_cuda

TPSERVE_API = 1

REQUIRES = ("flashinfer-python>=0.6.6,<0.7",)
PROBE = "tpserve_attn_flashinfer.plugin:probe"


@hookimpl
def tpserve_attentions() -> list[AttentionSpec]:
    """FlashInfer's kernels."""
    return [
        AttentionSpec(
            name="flashinfer",
            summary="attention on FlashInfer's kernels, for CUDA devices",
            factory="tpserve_attn_flashinfer.attention:FlashInferAttention",
            requires=REQUIRES,
            probe=PROBE,
            capabilities=AttentionCapabilities(
                devices=("cuda",),
                dtypes=("bfloat16", "float16"),
                head_dims=(128, 64, 256),
                min_sm=80,
                cuda_graph=True,
                sliding_window=True,
                soft_cap=True,
            ),
        )
    ]


@hookimpl
def tpserve_ops() -> list[OpsSpec]:
    """FlashInfer's kernels."""
    return [
        OpsSpec(
            name="flashinfer",
            summary="norms, rotation, store and activation on FlashInfer's kernels, for CUDA devices",
            factory="tpserve_attn_flashinfer.ops:FlashInferOps",
            requires=REQUIRES,
            probe=PROBE,
            capabilities=OpsCapabilities(
                devices=("cuda",),
                dtypes=("bfloat16", "float16"),
                min_sm=80,
                cuda_graph=True,
            ),
        )
    ]


def probe() -> str | None:
    """Say why the kernels cannot run here, or None."""
    reason = no_cuda()
    if reason:
        return reason
    try:
        from flashinfer.jit.cpp_ext import get_cuda_path
        from flashinfer.jit.env import has_flashinfer_jit_cache
    except Exception as error:  # noqa: BLE001 - it fails in many ways, by what else is installed, and all mean no
        return f"importing flashinfer failed: {type(error).__name__}: {error}"
    try:
        if not has_flashinfer_jit_cache():
            get_cuda_path()
    except RuntimeError:
        return "FlashInfer compiles its kernels here and finds no nvcc: install CUDA's, or flashinfer-jit-cache"
    return None
