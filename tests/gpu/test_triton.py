"""The Triton attention on CUDA: the contract in every dtype."""

from __future__ import annotations

import importlib.util

import msgspec
import pytest
import torch

from tpserve.api import Attention, AttentionShape, NoOptions
from tpserve.testing.attention import AttentionContract
from tpserve_attn_triton.plugin import tpserve_attentions

CAPABILITIES = tpserve_attentions()[0].capabilities
USABLE = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason="needs a CUDA device and triton")]


def make_attention(shape: AttentionShape) -> Attention:
    # Imported here: without a CUDA device, other tests import it for Triton's interpreter.
    from tpserve_attn_triton.attention import TritonAttention

    return TritonAttention(NoOptions(), shape)


class OnCuda(AttentionContract):
    device = "cuda"

    def make(self, shape: AttentionShape) -> Attention:
        return make_attention(shape)


class TestFloat32(OnCuda):
    capabilities = msgspec.structs.replace(CAPABILITIES, dtypes=("float32",))


class TestFloat16(OnCuda):
    capabilities = msgspec.structs.replace(CAPABILITIES, dtypes=("float16",))


class TestBfloat16(OnCuda):
    capabilities = msgspec.structs.replace(CAPABILITIES, dtypes=("bfloat16",))
