"""The FlashInfer attention on CUDA: the contract in both dtypes, and plans that nothing waits for."""

from __future__ import annotations

import importlib.util

import msgspec
import pytest
import torch
from tests.gpu.waiting import no_waiting

from tpserve.api import Attention, AttentionShape, NoOptions
from tpserve.attention.pair import PairedAttention
from tpserve.testing.attention import AttentionCase, AttentionContract
from tpserve_attn_flashinfer.plugin import tpserve_attentions

CAPABILITIES = tpserve_attentions()[0].capabilities
USABLE = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason="needs a CUDA device and flashinfer")]


def make_attention(shape: AttentionShape) -> Attention:
    # Imported here: flashinfer may not be there, and where it is, importing it may fail.
    from tpserve_attn_flashinfer.attention import FlashInferAttention

    return FlashInferAttention(NoOptions(), shape)


class OnCuda(AttentionContract):
    device = "cuda"

    def make(self, shape: AttentionShape) -> Attention:
        return make_attention(shape)


class TestBfloat16(OnCuda):
    capabilities = msgspec.structs.replace(CAPABILITIES, dtypes=("bfloat16",))


class TestFloat16(OnCuda):
    capabilities = msgspec.structs.replace(
        CAPABILITIES, dtypes=("float16",), head_dims=(128, 64), sliding_window=False, soft_cap=False
    )


class TestPair(OnCuda):
    """Prefill by one instance, decode by another."""

    capabilities = msgspec.structs.replace(
        CAPABILITIES, dtypes=("bfloat16",), head_dims=(128,), sliding_window=False, soft_cap=False
    )

    def make(self, shape: AttentionShape) -> Attention:
        return PairedAttention(shape, make_attention(shape), make_attention(shape))


def test_steps_are_planned_without_waiting_for_the_device() -> None:
    shape = TestBfloat16().shape()
    attention = make_attention(shape)
    decode = AttentionCase.random(shape, [(1, 20), (1, 300)])
    mixed = AttentionCase.random(shape, [(1, 20), (40, 300)])
    attention.replay(decode.batch)
    with no_waiting():
        for _ in range(5):
            attention.replay(decode.batch)
            attention.capture(decode.batch)
            attention.run(decode.query, decode.k_cache, decode.v_cache)
            attention.plan(mixed.batch)
            attention.run(mixed.query, mixed.k_cache, mixed.v_cache)
