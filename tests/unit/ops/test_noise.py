from __future__ import annotations

import math

import pytest
import torch

from tpserve.ops.noise import gumbel, row_keys, uniforms

M = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
CASES = [(0, 0), (1, 0), (0, 1), (-1, 7), (2**63 - 1, 8191), (-(2**63), 2**40), (123456789, 1)]


def mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M
    return z ^ (z >> 31)


def mix32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def key_of(seed: int, position: int) -> int:
    return mix64(mix64(seed & M) + (position + 1) * GAMMA & M)


def uniform_of(key: int, token: int) -> float:
    bits = mix32(mix32(token ^ (key & 0xFFFFFFFF)) + (key >> 32) & 0xFFFFFFFF)
    return ((bits >> 8) | 1) * 2.0**-24


def test_keys_are_those_of_the_definition() -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*CASES, strict=True))
    found = row_keys(seeds, positions)
    assert [key & M for key in found.tolist()] == [key_of(*case) for case in CASES]


def test_keys_leave_their_arguments_alone() -> None:
    seeds, positions = torch.tensor([3, 4]), torch.tensor([5, 6])
    row_keys(seeds, positions)
    assert (seeds.tolist(), positions.tolist()) == ([3, 4], [5, 6])


@pytest.mark.parametrize(("seed", "position"), CASES)
def test_uniforms_are_those_of_the_definition(seed: int, position: int) -> None:
    keys = row_keys(torch.tensor([seed]), torch.tensor([position]))
    found = uniforms(keys, 500)[0].tolist()
    assert found == [uniform_of(key_of(seed, position), token) for token in range(500)]


def test_the_64_bit_mix_is_that_of_splitmix64() -> None:
    # The generator's first outputs from state 1234567, as published with it.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix64(1234567 + (i + 1) * GAMMA & M) for i in range(4)] == published


def test_uniforms_stay_inside_the_interval() -> None:
    found = uniforms(row_keys(torch.arange(64), torch.arange(64)), 50_000)
    assert found.min() >= 2**-24
    assert found.max() <= 1 - 2**-24


def test_noise_is_finite_at_both_ends() -> None:
    ends = torch.tensor([2.0**-24, 1 - 2.0**-24])
    low, high = ends.log().neg().log().neg().tolist()
    assert low == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
    assert high == pytest.approx(24 * math.log(2), rel=1e-6)


def test_uniforms_pass_a_chi_square_test_over_tokens() -> None:
    found = uniforms(row_keys(torch.tensor([42]), torch.tensor([17])), 1 << 18)[0]
    assert chi_square(found, 256) < 340  # 255 degrees of freedom: exceeded once in 3,000


def test_uniforms_pass_a_chi_square_test_over_positions() -> None:
    positions = torch.arange(1 << 16)
    found = uniforms(row_keys(torch.full_like(positions, 7), positions), 3)[:, 2]
    assert chi_square(found, 256) < 340


def test_uniforms_pass_a_chi_square_test_over_seeds() -> None:
    seeds = torch.arange(1 << 16)
    found = uniforms(row_keys(seeds, torch.full_like(seeds, 5)), 1)[:, 0]
    assert chi_square(found, 256) < 340


def test_uniforms_pass_a_kolmogorov_smirnov_test() -> None:
    found = uniforms(row_keys(torch.tensor([-3]), torch.tensor([1])), 1 << 18)[0].double().sort().values
    steps = torch.arange(len(found), dtype=torch.float64)
    distance = torch.maximum((found - steps / len(found)).max(), ((steps + 1) / len(found) - found).max())
    assert distance * math.sqrt(len(found)) < 1.95  # exceeded once in 1,000


def test_neighbouring_rows_are_uncorrelated() -> None:
    keys = row_keys(torch.tensor([1, 1, 2, 1 << 32]), torch.tensor([1, 2, 1, 1]))
    correlation = torch.corrcoef(uniforms(keys, 1 << 16)) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(1 << 16)


def test_gumbel_noise_has_the_moments_of_its_distribution() -> None:
    found = gumbel(torch.arange(16), torch.zeros(16, dtype=torch.int64), 1 << 14).double()
    assert found.mean() == pytest.approx(0.577216, abs=0.01)
    assert found.var() == pytest.approx(math.pi**2 / 6, rel=0.02)


def chi_square(values: torch.Tensor, bins: int) -> float:
    counts = torch.histc(values.double(), bins, 0, 1)
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())
