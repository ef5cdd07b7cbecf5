"""What tpserve reads of this package; it imports neither torch nor triton."""

from __future__ import annotations

from tpserve.api import AttentionCapabilities, AttentionSpec, OpsCapabilities, OpsSpec, hookimpl

TPSERVE_API = 1


@hookimpl
def tpserve_attentions() -> list[AttentionSpec]:
    """Triton's kernels."""
    return [
        AttentionSpec(
            name="triton",
            summary="attention kernels written in Triton, for CUDA devices",
            factory="tpserve_attn_triton.attention:TritonAttention",
            requires=("triton>=3.6",),
            probe="tpserve.api.cuda:no_cuda",
            capabilities=AttentionCapabilities(
                devices=("cuda",),
                dtypes=("float32", "float16", "bfloat16"),
                head_dims=(64, 80, 96, 112, 128, 160, 192, 256, 16, 32),
                min_sm=80,
                cuda_graph=True,
                sliding_window=True,
                soft_cap=True,
            ),
        )
    ]


@hookimpl
def tpserve_ops() -> list[OpsSpec]:
    """Triton's kernels."""
    return [
        OpsSpec(
            name="triton",
            summary="fused steps and sampling written in Triton, for CUDA devices",
            factory="tpserve_attn_triton.ops:TritonOps",
            requires=("triton>=3.6",),
            probe="tpserve.api.cuda:no_cuda",
            capabilities=OpsCapabilities(
                devices=("cuda",),
                dtypes=("float32", "float16", "bfloat16"),
                min_sm=80,
                cuda_graph=True,
            ),
        )
    ]
