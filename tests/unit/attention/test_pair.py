from __future__ import annotations

import pytest
import torch

from tpserve.api import Attention, AttentionBatch, AttentionCapabilities, AttentionShape, NoOptions
from tpserve.attention.pair import PairedAttention
from tpserve.attention.reference import TorchAttention
from tpserve.testing.attention import AttentionCase, AttentionContract, attention_oracle


class Listening(TorchAttention):
    """Keeps what it was asked."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(NoOptions(), shape)
        self.asked: list[tuple[str, list[int], list[int]]] = []

    def plan(self, batch: AttentionBatch) -> None:
        self.asked.append(("plan", batch.query_lens, batch.kv_lens))
        super().plan(batch)

    def capture(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self.asked.append(("capture", batch.query_lens, batch.kv_lens))

    def replay(self, batch: AttentionBatch) -> None:
        self.asked.append(("replay", batch.query_lens, batch.kv_lens))


class TestPair(AttentionContract):
    capabilities = AttentionCapabilities(
        dtypes=("float32",), head_dims=(64,), page_sizes=(16,), sliding_window=True, soft_cap=True, cuda_graph=True
    )

    def make(self, shape: AttentionShape) -> Attention:
        return PairedAttention(shape, TorchAttention(NoOptions(), shape), Listening(shape))


SHAPE = TestPair().shape()


@pytest.mark.parametrize(
    ("lengths", "prefill", "decode"),
    [
        ([(1, 9), (1, 30)], [], [("plan", [1, 1], [9, 30])]),
        ([(5, 9), (7, 7)], [("plan", [5, 7], [9, 7])], []),
        ([(1, 9), (1, 3), (6, 9)], [("plan", [6], [9])], [("plan", [1, 1], [9, 3])]),
        ([(6, 9), (4, 20), (1, 9)], [("plan", [6, 4], [9, 20])], [("plan", [1], [9])]),
        ([(1, 9), (6, 9), (1, 3), (2, 8)], [("plan", [6, 2], [9, 8])], [("plan", [1, 1], [9, 3])]),
    ],
    ids=str,
)
def test_each_computes_its_own(
    lengths: list[tuple[int, int]], prefill: list[tuple[str, list[int]]], decode: list[tuple[str, list[int]]]
) -> None:
    first, second = Listening(SHAPE), Listening(SHAPE)
    pair = PairedAttention(SHAPE, first, second)
    case = AttentionCase.random(SHAPE, lengths)
    pair.plan(case.batch)
    assert (first.asked, second.asked) == (prefill, decode)
    found = pair.run(case.query, case.k_cache, case.v_cache)
    torch.testing.assert_close(found.double(), attention_oracle(case), rtol=2e-5, atol=2e-5)


def test_a_graph_holds_decode_alone() -> None:
    first, second = Listening(SHAPE), Listening(SHAPE)
    pair = PairedAttention(SHAPE, first, second)
    case = AttentionCase.random(SHAPE, [(1, 9), (1, 30)])
    pair.replay(case.batch)
    pair.capture(case.batch)
    assert first.asked == []
    assert [what for what, _, _ in second.asked] == ["replay", "capture"]
