"""What tpserve reads of this package; it imports neither torch nor flashinfer."""

from __future__ import annotations

from tpserve.api import AttentionCapabilities, AttentionSpec, hookimpl

TPSERVE_API = 1


@hookimpl
def tpserve_attentions() -> list[AttentionSpec]:
    """FlashInfer's kernels."""
    return [
        AttentionSpec(
            name="flashinfer",
            summary="attention on FlashInfer's kernels, for CUDA devices",
            factory="tpserve_attn_flashinfer.attention:FlashInferAttention",
            probe="tpserve_attn_flashinfer.plugin:probe",
            capabilities=AttentionCapabilities(devices=("cuda",), dtypes=("float16", "bfloat16"), min_sm=75),
        )
    ]


def probe() -> str:
    """Say why this part cannot be used."""
    return "this version of tpserve-attn-flashinfer has no kernels yet"
