from __future__ import annotations

import msgspec
import pytest
import torch

from tpserve.api import AttentionCapabilities, AttentionShape, NoOptions
from tpserve.attention.reference import TorchAttention, _Adjacent
from tpserve.testing.attention import AttentionCase, AttentionContract, attention_oracle

SHAPE = AttentionShape(
    layers=1,
    q_heads=6,
    kv_heads=2,
    head_dim=16,
    page_size=4,
    max_context=2048,
    max_running=4,
    scale=0.25,
    dtype="float32",
    device="cpu",
)


class TestTorchAttention(AttentionContract):
    capabilities = AttentionCapabilities(devices=("cpu",), sliding_window=True, soft_cap=True)

    def make(self, shape: AttentionShape) -> TorchAttention:
        return TorchAttention(NoOptions(), shape)


def test_adjacent_pages_are_read_in_place() -> None:
    case = AttentionCase.random(SHAPE, [(3, 22), (1, 9)])
    for slot, first, count in zip(case.batch.slots, (0, 6), (6, 3), strict=True):
        case.batch.page_table[slot, :count] = torch.arange(first, first + count)
    case.k_cache.normal_(generator=torch.Generator().manual_seed(1))
    case.v_cache.normal_(generator=torch.Generator().manual_seed(2))
    attention = TorchAttention(NoOptions(), SHAPE)
    attention.plan(case.batch)
    assert all(isinstance(part.cells, _Adjacent) for _, part in attention._parts)
    found = attention.run(case.query, case.k_cache, case.v_cache)
    torch.testing.assert_close(found.double(), attention_oracle(case), rtol=1e-5, atol=1e-5)


def test_a_long_chunk_is_masked_in_blocks() -> None:
    attention = TorchAttention(NoOptions(), SHAPE)
    case = AttentionCase.random(SHAPE, [(1200, 1500)])
    attention.plan(case.batch)
    ((_, part),) = attention._parts
    assert [block.mask.shape for block in part.blocks] == [(512, 812), (512, 1324), (176, 1500)]
    found = attention.run(case.query, case.k_cache, case.v_cache)
    torch.testing.assert_close(found.double(), attention_oracle(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [30.0, 50.0])
@pytest.mark.parametrize("lengths", [(1, 40), (20, 40)])
def test_capped_scores_are_computed_in_float32(soft_cap: float, lengths: tuple[int, int]) -> None:
    """Large scores that are rounded to bfloat16 before they are capped are wrong by as much as others differ."""
    shape = msgspec.structs.replace(SHAPE, head_dim=64, scale=1.0, soft_cap=soft_cap, dtype="bfloat16")
    case = AttentionCase.random(shape, [lengths])
    attention = TorchAttention(NoOptions(), shape)
    attention.plan(case.batch)
    found = attention.run(case.query, case.k_cache, case.v_cache)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), attention_oracle(case), rtol=2**-8, atol=1e-4)
