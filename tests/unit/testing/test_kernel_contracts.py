"""The contracts of attention and ops fail what breaks them, each breach by the test that is meant for it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
from tests.unit.testing import faulty_kernels

from tpserve.api import AttentionCapabilities, AttentionShape, NoOptions
from tpserve.attention.reference import TorchAttention
from tpserve.ops.reference import TorchOps
from tpserve.testing.attention import AttentionContract
from tpserve.testing.ops import OpsContract


class Attention(AttentionContract):
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(head_dims=(64,), dtypes=("float32",))

    def __init__(self, kind: type[TorchAttention]) -> None:
        self.kind = kind

    def make(self, shape: AttentionShape) -> TorchAttention:
        return self.kind(NoOptions(), shape)


class Ops(OpsContract):
    def __init__(self, kind: type[TorchOps]) -> None:
        self.kind = kind

    def make(self) -> TorchOps:
        return self.kind(NoOptions())


@pytest.mark.parametrize(
    ("fault", "test", "arguments"),
    [
        ("OwnScale", "test_page_sizes", (16, "one decode")),
        ("FirstEight", "test_large_batches", ("many decodes",)),
        ("FirstEight", "test_large_batches", ("many prompts",)),
        ("NearSighted", "test_large_batches", ("far decode",)),
        ("NearSighted", "test_large_batches", ("far chunk",)),
        ("ZeroWeight", "test_what_a_sequence_does_not_see_does_not_matter", (math.nan, "decode")),
        ("ZeroWeight", "test_what_a_sequence_does_not_see_does_not_matter", (math.inf, "mixed")),
        ("ZeroWeightBeforeTheWindow", "test_what_a_window_excludes_does_not_matter", (math.nan, 5, "decode")),
        ("ZeroWeightBeforeTheWindow", "test_what_a_window_excludes_does_not_matter", (math.inf, 48, "chunk")),
    ],
)
def test_a_faulty_attention_is_found(fault: str, test: str, arguments: tuple[Any, ...]) -> None:
    getattr(Attention(TorchAttention), test)(*arguments)
    with pytest.raises(AssertionError, match="not close"):
        getattr(Attention(getattr(faulty_kernels, fault)), test)(*arguments)


@pytest.mark.parametrize(
    ("fault", "test", "arguments"),
    [
        ("NarrowNorm", "test_rms_norm", ("float16", 16)),
        ("NarrowSum", "test_add_rms_norm", ("float16", 16)),
        ("ShortActivation", "test_silu_and_mul", ("float32", OpsContract.tokens[-1])),
    ],
)
def test_faulty_ops_are_found(fault: str, test: str, arguments: tuple[Any, ...]) -> None:
    getattr(Ops(TorchOps), test)(*arguments)
    with pytest.raises(AssertionError, match="not close"):
        getattr(Ops(getattr(faulty_kernels, fault)), test)(*arguments)


@pytest.mark.parametrize(
    ("fault", "test", "arguments", "says"),
    [
        (
            "PeriodicNoise",
            "test_a_large_vocabulary",
            (False,),
            r"row 1 of 3 \(temperature 5.0, seed 3\) of float32 logits",
        ),
        (
            "ShortGreedy",
            "test_a_large_vocabulary",
            (True,),
            r"row 0 of 2 .* logits of 50003 tokens draws token \d+, where",
        ),
        ("ShortGreedy", "test_a_large_vocabulary", (False,), "row 0 of 3"),
        ("FirstSeeds", "test_hundreds_of_rows", (), "row 256 of 300 .*top_k"),
    ],
)
def test_a_wrong_draw_is_found_and_told(fault: str, test: str, arguments: tuple[Any, ...], says: str) -> None:
    getattr(Ops(TorchOps), test)(*arguments)
    with pytest.raises(pytest.fail.Exception, match=says):
        getattr(Ops(getattr(faulty_kernels, fault)), test)(*arguments)
