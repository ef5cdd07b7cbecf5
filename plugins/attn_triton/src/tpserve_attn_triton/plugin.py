"""What tpserve reads of this package; it imports neither torch nor triton."""

from __future__ import annotations

from tpserve.api import AttentionCapabilities, AttentionSpec, hookimpl

TPSERVE_API = 1


@hookimpl
def tpserve_attentions() -> list[AttentionSpec]:
    """Triton's kernels."""
    return [
        AttentionSpec(
            name="triton",
            summary="attention kernels written in Triton, for CUDA devices",
            factory="tpserve_attn_triton.attention:TritonAttention",
            probe="tpserve_attn_triton.plugin:probe",
            capabilities=AttentionCapabilities(devices=("cuda",), dtypes=("float16", "bfloat16")),
        )
    ]


def probe() -> str:
    """Say why this part cannot be used."""
    return "this version of tpserve-attn-triton has no kernels yet"
