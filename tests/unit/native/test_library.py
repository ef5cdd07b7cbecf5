"""The kernels with vectors of other sizes than this processor has: those of AVX-512, and of NEON and SSE."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import torch

from tpserve.api import AttentionShape, NoOptions
from tpserve.attention.cpu import CpuAttention
from tpserve.native.build import COMPILERS, probe
from tpserve.native.library import load_kernels
from tpserve.ops.cpu import CpuOps
from tpserve.testing.attention import AttentionCase, attention_oracle

pytestmark = pytest.mark.skipif(bool(reason := probe()), reason=str(reason))


@pytest.fixture(scope="module", params=[16, 64])
def vector_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    """Compiles for another size of vectors."""
    with pytest.MonkeyPatch.context() as patch:
        compiler = os.environ.get("CXX") or next(name for name in COMPILERS if shutil.which(name))
        patch.setenv("CXX", f"{compiler} -DTPSERVE_VECTOR_BYTES={request.param}")
        assert probe() is None
        yield request.param


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_of_other_sizes(vector_bytes: int, dtype: str) -> None:
    assert load_kernels(dtype).panel_width == vector_bytes // 2
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    ops = CpuOps(NoOptions())

    def draw(*size: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)

    weight, x = draw(50, 300) / 300**0.5, draw(20, 300, seed=1)
    for rows in (1, 2, 5, 20):
        close(
            ops.linear(weight, weight[:, 0].contiguous())(x[:rows]),
            x[:rows].double() @ weight.double().T + weight[:, 0],
        )
    close(ops.rms_norm(x, x[0], 1e-5), torch.nn.functional.rms_norm(x.double(), (300,), x[0].double(), 1e-5))
    gate, up = x.double().chunk(2, dim=1)
    close(ops.silu_and_mul(x), gate * gate.sigmoid() * up)

    shape = AttentionShape(
        layers=1,
        q_heads=10,
        kv_heads=2,
        head_dim=80,
        page_size=16,
        max_context=512,
        max_running=4,
        scale=80**-0.5,
        dtype=dtype,
        device="cpu",
    )
    case = AttentionCase.random(shape, [(1, 1), (1, 150), (1, 64)])
    attention = CpuAttention(NoOptions(), shape)
    attention.plan(case.batch)
    close(attention.run(case.query, case.k_cache, case.v_cache), attention_oracle(case))
