from __future__ import annotations

import math

import pytest
import torch

from tpserve.api import NoOptions, OpsCapabilities
from tpserve.ops.reference import TorchOps
from tpserve.testing.draws import kept_tokens, sampling_batch
from tpserve.testing.ops import OpsContract

OPS = TorchOps(NoOptions())


class TestTorchOps(OpsContract):
    capabilities = OpsCapabilities(devices=("cpu",))

    def make(self) -> TorchOps:
        return OPS


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.9, "min_p": 0.02}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_draws_follow_the_distribution(filters: dict[str, float], temperature: float) -> None:
    draws, vocabulary = 40_000, 24
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * 2
    rows = [{"temperature": temperature, "seed": 11, "position": n, **filters} for n in range(draws)]
    tokens = OPS.sample(logits.expand(draws, -1).clone(), sampling_batch(rows))
    kept = kept_tokens(logits / temperature, **filters)  # type: ignore[arg-type]
    expected = (logits.double() / temperature).masked_fill(~kept, -math.inf).softmax(0) * draws
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    assert not counts[~kept].any()
    common = kept & (expected >= 10)
    chi_square = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    degrees = int(common.sum()) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 4


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]]).expand(3000, -1).clone()
    rows = [{"seed": 5, "position": n, "top_k": 2} for n in range(3000)]
    assert OPS.sample(logits, sampling_batch(rows)).unique().tolist() == [1, 2, 3, 4]


def test_a_flat_distribution_needs_the_whole_vocabulary() -> None:
    logits = torch.zeros(64, 5000)
    logits[:, 4000:] = -10
    rows = [{"seed": 1, "position": n, "top_p": 0.99} for n in range(64)]
    tokens = OPS.sample(logits, sampling_batch(rows))
    assert int(tokens.max()) < 4000
    assert len(tokens.unique()) > 55


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.tensor([[500.0, 499.0, 1e4, 9e3]])
    for temperature in (1e-40, 1e-8, 1e-4):
        rows = [{"temperature": temperature, "top_p": 0.9, "min_p": 0.1, "top_k": 3}]
        assert OPS.sample(logits.clone(), sampling_batch(rows)).tolist() == [2]
