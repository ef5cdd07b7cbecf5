from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tpserve.api import NoOptions
from tpserve.native.build import probe
from tpserve.ops.cpu import CpuOps
from tpserve.plugins.builtin import tpserve_ops
from tpserve.testing.ops import OpsContract

pytestmark = pytest.mark.skipif(bool(reason := probe()), reason=str(reason))

DTYPES = [torch.float32, torch.bfloat16]
EVERY_ROW_COUNT = [1, 2, 3, 5, 6, 7, 12, 13, 31, 64]


@pytest.fixture
def ops() -> CpuOps:
    return CpuOps(NoOptions())


@pytest.fixture
def threads() -> Iterator[None]:
    """Lets a test change the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class TestCpuOps(OpsContract):
    capabilities = next(spec for spec in tpserve_ops() if spec.name == "cpu").capabilities

    def make(self) -> CpuOps:
        return CpuOps(NoOptions())


def draw(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", [1, 257, 1536])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(ops: CpuOps, dtype: torch.dtype, depth: int) -> None:
    product, x = ops.linear(draw(50, depth, dtype=dtype), draw(50, dtype=dtype, seed=2)), draw(64, depth, dtype=dtype)
    alone = torch.cat([product(row) for row in x.split(1)])
    for rows in EVERY_ROW_COUNT:
        assert torch.equal(product(x[:rows]), alone[:rows])
        assert torch.equal(product(x[-rows:]), alone[-rows:])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(ops: CpuOps, dtype: torch.dtype) -> None:
    product, x = ops.linear(draw(200, 300, dtype=dtype)), draw(300, 300, dtype=dtype, seed=1)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        total, residual = ops.add_rms_norm(x.clone(), x.clone(), x[0], 1e-5)
        found.append(torch.cat((product(x), ops.silu_and_mul(x), ops.rms_norm(x, x[0], 1e-5), total, residual), dim=1))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_a_long_sum_is_as_exact_as_float32_goes(ops: CpuOps, rows: int) -> None:
    weight, x = draw(70, 5000), draw(rows, 5000, seed=1)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(ops.linear(weight)(x).double(), expected, rtol=0, atol=1e-5 * math.sqrt(5000))


def test_a_weight_may_be_freed_or_changed_afterwards(ops: CpuOps) -> None:
    weight, x = draw(20, 30), draw(2, 30, seed=1)
    product, expected = ops.linear(weight), x @ weight.T
    weight.zero_()
    torch.testing.assert_close(product(x), expected)


def test_bfloat16_rounds_to_nearest_and_ties_to_even(ops: CpuOps) -> None:
    ulp = 2.0**-7
    sums = [1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 0.51 * ulp, 1 + 0.49 * ulp, -(1 + ulp / 2), 3e38 + 1e37, math.inf]
    parts = torch.tensor([[math.copysign(1, s), s - math.copysign(1, s)] for s in sums])
    parts[5] = torch.tensor([3e38, 1e38])
    weight = parts.bfloat16()
    found = ops.linear(weight)(torch.ones(1, 2, dtype=torch.bfloat16))[0]
    assert torch.equal(found, weight.float().sum(dim=1).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_a_number_stays_so(ops: CpuOps, dtype: torch.dtype) -> None:
    x = torch.full((1, 32), math.nan, dtype=dtype)
    assert ops.linear(draw(40, 32, dtype=dtype))(x).isnan().all()
    assert ops.silu_and_mul(x).isnan().all()
    assert ops.rms_norm(x, x[0].nan_to_num(1), 1e-5).isnan().all()


def test_silu_from_end_to_end(ops: CpuOps) -> None:
    gate = torch.cat((torch.linspace(-110, 110, 10_001), torch.tensor([-1e30, 1e30, 0.0])))
    found = ops.silu_and_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    expected = gate.double() * gate.double().sigmoid()
    torch.testing.assert_close(found.double(), expected, rtol=5e-7, atol=1e-8)
