"""The FlashInfer ops on CUDA: the contract in both dtypes, and beside the Triton ops in one model's steps."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tests.gpu.waiting import no_waiting

from tpserve.api import NoOptions, Ops
from tpserve.testing.ops import OpsContract
from tpserve_attn_flashinfer.plugin import tpserve_ops

USABLE = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason="needs a CUDA device and flashinfer")]


def make_ops() -> Ops:
    # Imported here: flashinfer may not be there, and where it is, importing it may fail.
    from tpserve_attn_flashinfer.ops import FlashInferOps

    return FlashInferOps(NoOptions())


class TestFlashInferOps(OpsContract):
    capabilities = tpserve_ops()[0].capabilities
    device = "cuda"
    vocabularies = (33, 1500, 151_936)

    def make(self) -> Ops:
        return make_ops()


def test_steps_agree_with_triton_and_wait_for_nothing() -> None:
    """The sizes of a real layer, more tokens than a block has, and slots all over the cache."""
    from tpserve_attn_triton.ops import TritonOps

    def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator("cuda").manual_seed(1), device="cuda", dtype=dtype)

    slots = torch.randperm(4096, device="cuda")[:1000]
    found = []
    for ops in (make_ops(), TritonOps(NoOptions())):

        def step(ops: Ops = ops) -> list[torch.Tensor]:
            caches = [torch.zeros(256, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
            angles = draw(1000, 64, dtype=torch.float32)
            cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
            norms = draw(128), draw(128)
            normed, added = ops.add_rms_norm(draw(1000, 4096), draw(1000, 4096), draw(4096), 1e-6)
            q = ops.rotate_and_store(draw(1000, 48, 128), cos_sin, *caches, slots, *norms, eps=1e-6)
            return [normed, added, q, *caches, ops.silu_and_mul(draw(1000, 2 * 3072))]

        step()
        with no_waiting():
            found.append(step())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)
