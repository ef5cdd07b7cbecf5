"""The ops compute what the contract says, on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tpserve.api import NoOptions
from tpserve.testing.ops import OpsContract
from tpserve.testing.package import PackageContract
from tpserve_attn_triton.plugin import tpserve_ops

pytest.importorskip("triton")

from tpserve_attn_triton.ops import TritonOps

SPEC = tpserve_ops()[0]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TestPackage(PackageContract):
    plugin = "ops.triton"


class TestTritonOps(OpsContract):
    capabilities = SPEC.capabilities
    device = DEVICE
    tokens = (1, 3, 17)
    vocabularies = (33, 1500)

    def make(self) -> TritonOps:
        return TritonOps(NoOptions())
