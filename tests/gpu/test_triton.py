"""The Triton attention on CUDA: the contract in every dtype, and a CUDA graph over growing lengths."""

from __future__ import annotations

import importlib.util

import msgspec
import pytest
import torch

from tpserve.api import Attention, AttentionShape, NoOptions
from tpserve.testing.attention import AttentionCase, AttentionContract, attention_oracle
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


@pytest.mark.parametrize("plan_in_graph", [True, False])
def test_a_graph_of_decode_is_right_for_other_lengths(plan_in_graph: bool) -> None:
    shape = TestBfloat16().shape(q_heads=16, kv_heads=8, head_dim=128, max_context=4096)
    first = AttentionCase.random(shape, [(1, 1), (1, 600), (1, 31), (1, 32)])
    attention = make_attention(shape)
    attention.plan(first.batch)
    attention.run(first.query, first.k_cache, first.v_cache)
    torch.cuda.synchronize()
    case = AttentionCase.random(shape, [(1, 700), (1, 4096), (1, 2047), (1, 5)], seed=1)
    full = case.batch.kv_lens_tensor.clone()
    graph = torch.cuda.CUDAGraph()
    case.batch.kv_lens_tensor.fill_(1)
    attention.plan(case.batch)
    with torch.cuda.graph(graph):
        if plan_in_graph:
            attention.plan(case.batch)
        found = attention.run(case.query, case.k_cache, case.v_cache)
    for lengths in ([1, 1, 1, 1], [64, 300, 2, 5], full.tolist(), [700, 4000, 1, 3]):
        case.batch.kv_lens_tensor.copy_(torch.tensor(lengths))
        case.batch.kv_lens[:] = lengths
        if not plan_in_graph:
            attention.plan(case.batch)
        graph.replay()
        torch.testing.assert_close(found.double().cpu(), attention_oracle(case), rtol=3e-2, atol=3e-2)
