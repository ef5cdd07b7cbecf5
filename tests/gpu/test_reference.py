"""The torch attention and ops on CUDA."""

from __future__ import annotations

import pytest
import torch

from tpserve.api import AttentionCapabilities, AttentionShape, NoOptions, OpsCapabilities
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
