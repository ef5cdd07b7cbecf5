"""The torch attention and ops on CUDA."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.waiting import no_waiting

from tpserve.api import AttentionCapabilities, AttentionShape, NoOptions, OpsCapabilities, SamplingBatch
from tpserve.attention.reference import TorchAttention
from tpserve.ops.reference import TorchOps
from tpserve.testing.attention import AttentionContract
from tpserve.testing.ops import OpsContract

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestTorchAttention(AttentionContract):
    capabilities = AttentionCapabilities(devices=("cuda",), sliding_window=True, soft_cap=True)
    device = "cuda"

    def make(self, shape: AttentionShape) -> TorchAttention:
        return TorchAttention(NoOptions(), shape)


class TestTorchOps(OpsContract):
    capabilities = OpsCapabilities(devices=("cuda",))
    device = "cuda"

    def make(self) -> TorchOps:
        return TorchOps(NoOptions())


def test_a_draw_from_a_large_vocabulary_does_not_wait_for_the_device() -> None:
    ops, device = TorchOps(NoOptions()), torch.device("cuda")
    batch = SamplingBatch(
        temperature=torch.tensor([1.0, 0.7], device=device),
        top_k=torch.tensor([0, 3000], dtype=torch.int32, device=device),
        top_p=torch.tensor([0.99, 1.0], device=device),
        min_p=torch.zeros(2, device=device),
        seed=torch.tensor([1, 2], device=device),
        position=torch.tensor([5, 6], device=device),
        all_greedy=False,
        any_filter=True,
    )
    logits = torch.rand(2, 20_000, device=device)
    expected = ops.sample(logits, batch)
    with no_waiting():
        found = ops.sample(logits, batch)
    assert torch.equal(found, expected)
