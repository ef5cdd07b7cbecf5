"""The Triton ops on CUDA: the contract in every dtype, and what a server counts on while it runs."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tests.gpu.waiting import no_waiting

from tpserve.api import NoOptions, Ops
from tpserve.engine.rehearsal import FEW
from tpserve.ops.reference import TorchOps
from tpserve.testing.draws import sampling_batch
from tpserve.testing.ops import OpsContract
from tpserve_attn_triton.plugin import tpserve_ops

USABLE = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason="needs a CUDA device and triton")]


def make_ops() -> Ops:
    # Imported here: without a CUDA device, other tests import it for Triton's interpreter.
    from tpserve_attn_triton.ops import TritonOps

    return TritonOps(NoOptions())


class TestTritonOps(OpsContract):
    capabilities = tpserve_ops()[0].capabilities
    device = "cuda"
    vocabularies = (33, 1500, 151_936)

    def make(self) -> Ops:
        return make_ops()


def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator("cuda").manual_seed(1), device="cuda", dtype=dtype)


def test_a_draw_does_not_wait_for_the_device() -> None:
    rows = [{"temperature": 1.0}, {"top_k": 3000}, {"top_p": 0.99}, {"temperature": 0.0}]
    batch, logits, ops = sampling_batch(rows, "cuda"), draw(4, 151_936), make_ops()
    expected = TorchOps(NoOptions()).sample(logits, batch)
    ops.sample(logits, batch)
    with no_waiting():
        found = ops.sample(logits, batch)
    assert torch.equal(found, expected)


def test_other_numbers_of_rows_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    ops = make_ops()
    weight, norm = draw(192, 128), draw(128)
    linear, gated = ops.linear(weight), ops.gated_linear(weight)
    large = draw(6144, 4096)
    larges = ops.linear(large), ops.gated_linear(large)
    in_parts, qkv = ops.linear_in_parts(draw(4096, 4096)), ops.linear_in_parts(large)
    turned = ops.linear_in_parts(draw(4096, 14_336))
    wide = ops.gated_linear(draw(28_672, 4096))
    hidden = draw(4096)
    caches = [draw(25, 16, 1, 64) for _ in range(2)]

    def run(n: int) -> None:
        x, normed = draw(n, 128), ops.rms_norm(draw(n, 128), norm, 1e-6)
        ops.add_rms_norm(x, normed, norm, 1e-6)
        ops.rotate_and_store(
            linear(x).view(n, 3, 64), draw(n, 64, dtype=torch.float32), *caches, torch.arange(n).cuda()
        )
        ops.silu_and_mul(gated(x))
        for each in (*larges, wide):
            each(draw(n, 4096))
        parts = qkv(draw(n, 4096)).unflatten(-1, (96, 64))
        ops.rotate_and_store(parts, draw(n, 64, dtype=torch.float32), *caches, torch.arange(n).cuda())
        for product, columns in ((in_parts, 4096), (turned, 14_336)):
            ops.add_rms_norm(product(draw(n, columns)), draw(n, 4096), hidden, 1e-6)
        for row in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3}):
            ops.sample(draw(n, 5000), sampling_batch([row] * n, "cuda"))

    for n in (*FEW, 385):
        run(n)
    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **known: compiled.append(known["key"]))
    for n in (1, 2, 3, 5, 16, 31, 32, 63, 64, 100, 128, 129, 192, 200, 256, 300, 400):
        run(n)
    assert not compiled


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 33, 64, 65, 100, 128, 200, 256, 300])
@pytest.mark.parametrize(("out", "columns"), [(4096, 4096), (6144, 4096), (28_672, 4096), (4096, 14_336)])
def test_large_weights_are_multiplied_rightly_however_that_is_done(out: int, columns: int, rows: int) -> None:
    weight, x, ops = draw(out, columns) / columns**0.5, draw(rows, columns), make_ops()
    library = torch.backends.cuda.preferred_blas_library()
    expected = x.float() @ weight.float().T
    gate, up = expected.chunk(2, dim=-1)
    for found, right in (
        (ops.linear(weight)(x), expected),
        (ops.gated_linear(weight)(x), gate * gate.sigmoid() * up),
    ):
        torch.testing.assert_close(found.float(), right, rtol=0.03, atol=0.03)
    assert torch.backends.cuda.preferred_blas_library() == library
    residual = draw(rows, out).mul_(0.1)
    total = expected + residual.float()
    normed, added = ops.add_rms_norm(ops.linear_in_parts(weight)(x), residual, draw(out), 1e-6)
    torch.testing.assert_close(added.float(), total, rtol=0.03, atol=0.03)
    expected = torch.nn.functional.rms_norm(total, (out,), draw(out).float(), 1e-6)
    torch.testing.assert_close(normed.float(), expected, rtol=0.03, atol=0.06)


def test_cells_past_two_billion_numbers_are_reached() -> None:
    cells = (1 << 31) // 1024 + 64
    caches = [torch.empty(cells // 16, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    qkv = draw(2, 20, 128)
    slots = torch.tensor([cells - 1, 0], device="cuda")
    make_ops().rotate_and_store(qkv, torch.ones(2, 128, device="cuda"), *caches, slots)
    assert torch.equal(caches[1].flatten(0, 1)[slots], qkv[:, 12:])
