"""What FlashInfer is told of a step's tensors; without FlashInfer, an imitation computes from it."""

from __future__ import annotations

import pytest
import torch

from tpserve.api import NoOptions
from tpserve.testing.ops import OpsContract
from tpserve.testing.package import PackageContract
from tpserve_attn_flashinfer.ops import FlashInferOps
from tpserve_attn_flashinfer.plugin import tpserve_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TestPackage(PackageContract):
    plugin = "ops.flashinfer"


class TestFlashInferOps(OpsContract):
    capabilities = tpserve_ops()[0].capabilities
    device = DEVICE
    tokens = (1, 5)
    vocabularies = (1500,)

    def make(self) -> FlashInferOps:
        return FlashInferOps(NoOptions())


def store(ops: FlashInferOps, tokens: int) -> None:
    qkv = torch.randn(tokens, 4, 64, device=DEVICE).bfloat16()
    caches = [torch.zeros(8, 16, 1, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.arange(tokens, device=DEVICE) + 7
    ops.rotate_and_store(qkv, torch.ones(tokens, 64, device=DEVICE), *caches, slots)
    assert torch.equal(caches[1].flatten(0, 1)[slots], qkv[:, 3:])


def test_the_largest_step_counts_for_all() -> None:
    ops = FlashInferOps(NoOptions())
    store(ops, 40)
    places = ops._counted.places
    for tokens in (1, 40):
        store(ops, tokens)
        assert ops._counted.places is places
    store(ops, 41)
    assert len(ops._counted.places) == 41


@pytest.mark.skipif(DEVICE == "cpu", reason="for what a CUDA graph can hold")
def test_what_a_graph_counts_is_for_that_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = FlashInferOps(NoOptions())
    store(ops, 4)
    kept = ops._counted
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert len(ops._count(9, kept.places.device).places) == 9
    assert ops._counted is kept
