"""The contracts of attention and ops find what breaks them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.testing.finding import passes

FAULTY = Path(__file__).with_name("faulty_kernels.py")


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("OwnScale", "test_page_sizes[16-one decode]"),
        ("FirstEight", "test_large_batches[many decodes]"),
        ("FirstEight", "test_large_batches[many prompts]"),
        ("NearSighted", "test_large_batches[far decode]"),
        ("NearSighted", "test_large_batches[far chunk]"),
    ],
)
def test_a_faulty_attention_is_found(fault: str, test: str) -> None:
    assert passes(FAULTY, "Sound", test, "TestAttention")
    assert not passes(FAULTY, fault, test, "TestAttention")


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("PeriodicNoise", "test_a_large_vocabulary[False]"),
        ("ShortGreedy", "test_a_large_vocabulary[True]"),
        ("ShortGreedy", "test_a_large_vocabulary[False]"),
        ("NarrowNorm", "test_rms_norm[float16-16]"),
        ("NarrowSum", "test_add_rms_norm[float16-16]"),
        ("ShortActivation", "test_silu_and_mul[float32-333]"),
        ("FirstSeeds", "test_hundreds_of_rows"),
    ],
)
def test_faulty_ops_are_found(fault: str, test: str) -> None:
    assert passes(FAULTY, "SoundOps", test, "TestOps")
    assert not passes(FAULTY, fault, test, "TestOps")
