from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from tpserve.api import AttentionBatch, AttentionShape, NoOptions
from tpserve.attention.cpu import CpuAttention
from tpserve.native.build import probe
from tpserve.plugins.builtin import tpserve_attentions
from tpserve.testing.attention import AttentionCase, AttentionContract, attention_oracle

pytestmark = pytest.mark.skipif(bool(reason := probe()), reason=str(reason))

SHAPE = AttentionShape(
    layers=1,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    page_size=16,
    max_context=2048,
    max_running=16,
    scale=0.125,
    dtype="float32",
    device="cpu",
)
MANY = [(1, 1), (1, 700), (1, 64), (1, 65), (1, 63), (1, 128), (1, 300)]


@pytest.fixture
def threads() -> Iterator[None]:
    """Lets a test change the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class TestCpuAttention(AttentionContract):
    capabilities = next(spec for spec in tpserve_attentions() if spec.name == "cpu").capabilities

    def make(self, shape: AttentionShape) -> CpuAttention:
        return CpuAttention(NoOptions(), shape)


def only(batch: AttentionBatch, index: int) -> AttentionBatch:
    """A batch of one of the sequences."""
    one = slice(index, index + 1)
    return AttentionBatch(
        query_lens=batch.query_lens[one],
        kv_lens=batch.kv_lens[one],
        page_table=batch.page_table,
        slots=batch.slots[one],
        slots_tensor=batch.slots_tensor[one],
        kv_lens_tensor=batch.kv_lens_tensor[one],
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
    )


def attend(shape: AttentionShape, batch: AttentionBatch, query: torch.Tensor, case: AttentionCase) -> torch.Tensor:
    attention = CpuAttention(NoOptions(), shape)
    attention.plan(batch)
    return attention.run(query, case.k_cache, case.v_cache)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 100])
def test_a_sequence_has_the_same_bits_in_any_company(dtype: str, window: int) -> None:
    shape = msgspec.structs.replace(SHAPE, dtype=dtype, sliding_window=window)
    case = AttentionCase.random(shape, MANY)
    together = attend(shape, case.batch, case.query, case)
    mixed = AttentionCase.random(shape, [*MANY, (5, 40)])
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(attend(shape, case.batch, case.query, case), together)
        for index in range(len(MANY)):
            alone = attend(shape, only(mixed.batch, index), mixed.query[index : index + 1], mixed)
            assert torch.equal(alone[0], attend(shape, mixed.batch, mixed.query, mixed)[index])


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 2), (8, 2), (14, 2), (16, 2)])
def test_every_number_of_heads_to_a_kv_head(heads: tuple[int, int]) -> None:
    shape = msgspec.structs.replace(SHAPE, q_heads=heads[0], kv_heads=heads[1], head_dim=80)
    case = AttentionCase.random(shape, MANY)
    found = attend(shape, case.batch, case.query, case)
    torch.testing.assert_close(found.double(), attention_oracle(case), rtol=2e-5, atol=2e-5)


def test_queries_may_lie_between_keys_and_values() -> None:
    case = AttentionCase.random(SHAPE, MANY)
    qkv = torch.full((len(MANY), 15, 64), 1e9)
    qkv[:, :9] = case.query
    found = attend(SHAPE, case.batch, qkv[:, :9], case)
    assert torch.equal(found, attend(SHAPE, case.batch, case.query, case))


def test_one_score_that_towers_over_all_others() -> None:
    case = AttentionCase.random(SHAPE, [(1, 200)])
    page = int(case.batch.page_table[case.batch.slots[0], 150 // 16])
    case.k_cache[page, 150 % 16] = 100 * case.query[0, ::3]
    found = attend(SHAPE, case.batch, case.query, case)
    torch.testing.assert_close(found.double(), attention_oracle(case), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found[0, ::3], case.v_cache[page, 150 % 16])
