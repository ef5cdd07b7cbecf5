"""Draws from rows that are not what the contract speaks of."""

from __future__ import annotations

import math

import pytest
import torch

from tpserve.api import NoOptions
from tpserve.testing.draws import sampling_batch

pytest.importorskip("triton")

from tpserve_attn_triton.ops import TritonOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = TritonOps(NoOptions())


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # its interpreter tells of what is not finite
@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.inf])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_a_row_that_is_not_finite_draws_a_token_and_spoils_no_other(
    bad: float, whole: bool, filters: dict[str, float]
) -> None:
    good = torch.randn(3, 1500, generator=torch.Generator().manual_seed(1))
    logits = good.clone()
    logits[1, slice(None) if whole else slice(700, 702)] = bad
    batch = sampling_batch([{"seed": 1, "position": n, **filters} for n in range(3)], DEVICE)
    found = OPS.sample(logits.to(DEVICE), batch).tolist()
    expected = OPS.sample(good.to(DEVICE), batch).tolist()
    assert 0 <= found[1] < 1500
    assert [found[0], found[2]] == [expected[0], expected[2]]
