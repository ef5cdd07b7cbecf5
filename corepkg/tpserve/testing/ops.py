"""The contract of the ``ops`` kind as tests: subclass :class:`OpsContract` and name your implementation.

class TestMine(OpsContract):
    capabilities = plugin.SPEC.capabilities

    def make(self):
        return MyOps(MyOptions())
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from tpserve.testing.draws import TOLERANCE, DrawContract, sampling_batch

__all__ = ["OpsContract"]

LARGE = 300
"""Times a number about 1, its square is more than float16 holds."""


class OpsContract(DrawContract):
    """What every set of ops must compute.

    Attributes:
        capabilities: of the spec; dtypes outside them are not run, and a CUDA graph only if it can hold them.
        tokens: numbers of rows.
    """

    tokens: ClassVar[tuple[int, ...]] = (1, 2, 16, 67, 333)

    def axes(self) -> dict[str, list[Any]]:
        """What each test is run over, by the names of its arguments."""
        return super().axes() | {
            "tokens": list(self.tokens),
            "head_dim": [16, 64, 80, 128],
            "normed": [False, True],
            "bias": [False, True],
            "size": [2, 100, 3000],
            "heads": [(1, 1), (3, 1), (14, 2), (5, 5)],
            "shape": [(33, 40), (70, 1500), (130, 1024)],
        }

    def close(self, found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
        """Compare with a float64 result, as far as the dtype goes."""
        assert found.dtype == getattr(torch, dtype)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance)

    def test_linear(self, dtype: str, tokens: int, bias: bool) -> None:
        """A product, with and without a bias, and twice: packing must not use a weight up."""
        self.check_product(96, 64, dtype, tokens, bias)

    def test_linear_shapes(self, dtype: str, tokens: int, shape: tuple[int, int]) -> None:
        """Sizes that are no powers of two, and several blocks of columns."""
        self.check_product(*shape, dtype, tokens, bias=False)

    def check_product(self, out: int, columns: int, dtype: str, tokens: int, bias: bool) -> None:
        """Compare with the definition: weights small enough that a sum of many products stays near 1."""
        weight, x = self.draw(out, columns, dtype=dtype) / columns**0.5, self.draw(tokens, columns, dtype=dtype, seed=1)
        offset = self.draw(out, dtype=dtype, seed=2) if bias else None
        expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        linear = self.make().linear(weight, offset)
        for _ in range(2):
            self.close(linear(x), expected, dtype)

    def test_gated_linear(self, dtype: str, tokens: int, bias: bool) -> None:
        """A product, and the silu of its first half times the second."""
        weight, x = self.draw(2 * 42, 96, dtype=dtype) / 8, self.draw(tokens, 96, dtype=dtype, seed=1)
        offset = self.draw(2 * 42, dtype=dtype, seed=2) if bias else None
        product = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        gate, up = product.chunk(2, dim=-1)
        found = self.make().gated_linear(weight, offset)(x)
        assert found.dtype == getattr(torch, dtype)
        # The product may be rounded before the activation.
        tolerance = 3 * TOLERANCE[dtype]
        torch.testing.assert_close(found.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=tolerance)

    def test_linear_takes_any_number_of_rows(self) -> None:
        """One product serves every batch size, none included, and rows that are a view."""
        weight = self.draw(96, 64)
        linear = self.make().linear(weight)
        for rows in (0, 1, 3, 1, 40, 3):
            x = self.draw(rows, 128, seed=rows)[:, 64:]
            torch.testing.assert_close(linear(x), x @ weight.T, rtol=1e-4, atol=1e-4)

    def test_rms_norm(self, dtype: str, tokens: int) -> None:
        """The definition: x / sqrt(mean(x²) + eps) · weight; eps matters for small rows, float32 for large ones."""
        x, weight = self.draw(tokens, 96, dtype=dtype), self.draw(96, dtype=dtype, seed=1)
        x[0] *= 1e-3
        x[1:2] *= LARGE
        self.close(self.make().rms_norm(x, weight, 1e-5), _rms_norm(x, weight, 1e-5), dtype)

    def test_rms_norm_sizes(self, size: int) -> None:
        """Sizes that are no powers of two; large numbers, whose squares do not overflow."""
        x, weight = self.draw(3, size) * 1e4, self.draw(size, seed=1)
        x[1] = 1
        self.close(self.make().rms_norm(x, weight, 1e-5), _rms_norm(x, weight, 1e-5), "float32")

    def test_add_rms_norm(self, dtype: str, tokens: int) -> None:
        """The sum, and the norm of the sum."""
        x, residual, weight = (self.draw(tokens, 96, dtype=dtype, seed=s) for s in (0, 1, 2))
        residual[1:2] *= LARGE
        total = x.double() + residual.double()
        normed, added = self.make().add_rms_norm(x, residual, weight[0], 1e-5)
        self.close(added, total, dtype)
        self.close(normed, _rms_norm(added, weight[0], 1e-5), dtype)

    def test_a_product_in_parts_is_added_up(self, dtype: str, tokens: int, bias: bool) -> None:
        """Whatever a product in parts returns, the norm adds it up with the residual."""
        weight, x = self.draw(96, 64, dtype=dtype) / 8, self.draw(tokens, 64, dtype=dtype, seed=1)
        offset = self.draw(96, dtype=dtype, seed=2) if bias else None
        residual, norm = self.draw(tokens, 96, dtype=dtype, seed=3), self.draw(96, dtype=dtype, seed=4)
        total = x.double() @ weight.double().T + residual.double() + (0 if offset is None else offset.double())
        ops = self.make()
        normed, added = ops.add_rms_norm(ops.linear_in_parts(weight, offset)(x), residual, norm, 1e-5)
        self.close(added, total, dtype)
        self.close(normed, _rms_norm(added, norm, 1e-5), dtype)

    def test_silu_and_mul(self, dtype: str, tokens: int) -> None:
        """The silu of the first half times the second."""
        x = self.draw(tokens, 192, dtype=dtype)
        gate, up = x.double().chunk(2, dim=-1)
        self.close(self.make().silu_and_mul(x), gate * gate.sigmoid() * up, dtype)

    def test_silu_and_mul_sizes(self, size: int) -> None:
        """Sizes that are no powers of two; gates so low that their exponential overflows."""
        x = self.draw(3, 2 * size)
        x[0, :size] = -1000
        gate, up = x.double().chunk(2, dim=-1)
        self.close(self.make().silu_and_mul(x), gate * gate.sigmoid() * up, "float32")

    def test_rotate_and_store(self, dtype: str, tokens: int, normed: bool) -> None:
        """Rotation and store, in every dtype."""
        self.check_rotation(dtype, tokens, normed, 64, (6, 2))

    def test_a_product_in_parts_is_rotated(self, dtype: str, tokens: int) -> None:
        """Whatever a product in parts returns, the rotation gives what it gives for the whole product."""
        weight, x = self.draw(4 * 64, 48, dtype=dtype) / 7, self.draw(tokens, 48, dtype=dtype, seed=1)
        angles, ops = self.draw(tokens, 32, seed=3), self.make()
        cos_sin, slots = torch.cat((angles.cos(), angles.sin()), dim=1), torch.arange(tokens, device=self.device)
        results = []
        for product in (ops.linear_in_parts(weight)(x), (x.double() @ weight.double().T).to(x.dtype)):
            cells = torch.zeros(2, tokens, 1, 1, 64, dtype=x.dtype, device=self.device)
            q = ops.rotate_and_store(product.view(*product.shape[:-1], 4, 64), cos_sin, cells[0], cells[1], slots)
            results.append((q, cells))
        (q, cells), (expected_q, expected_cells) = results
        self.close(q, expected_q.double(), dtype)
        self.close(cells, expected_cells.double(), dtype)

    def test_rotate_and_store_head_dims(self, head_dim: int, normed: bool) -> None:
        """Rotation and store, at every size of a head."""
        self.check_rotation("float32", 5, normed, head_dim, (6, 2))

    def test_rotate_and_store_heads(self, heads: tuple[int, int]) -> None:
        """Rotation and store, for few heads and for many, in groups and without."""
        self.check_rotation("float32", 3, True, 32, heads)

    def check_rotation(self, dtype: str, tokens: int, normed: bool, head_dim: int, heads: tuple[int, int]) -> None:
        """Compare with the definition; cells of other tokens stay as they are."""
        (q_heads, kv_heads), page_size, pages = heads, 4, 32 + tokens // 4
        qkv = self.draw(tokens, q_heads + 2 * kv_heads, head_dim, dtype=dtype)
        if normed:
            qkv[1:2] *= LARGE
        q_norm, k_norm = (self.draw(head_dim, dtype=dtype, seed=s) if normed else None for s in (1, 2))
        angles = self.draw(tokens, head_dim // 2, seed=3) * 3
        k_cache, v_cache = (self.draw(pages, page_size, kv_heads, head_dim, dtype=dtype, seed=s) for s in (4, 5))
        slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(6))[:tokens].to(self.device)
        q, k, v = torch.split(qkv.double(), [q_heads, kv_heads, kv_heads], dim=1)
        expected_q, expected_k = (
            _rotate(each if norm is None else _rms_norm(each, norm, 1e-6), angles.double())
            for each, norm in ((q, q_norm), (k, k_norm))
        )
        caches = [
            cache.double().flatten(0, 1).index_copy(0, slots, new)
            for cache, new in ((k_cache, expected_k), (v_cache, v))
        ]
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        found = self.make().rotate_and_store(qkv, cos_sin, k_cache, v_cache, slots, q_norm, k_norm, eps=1e-6)
        self.close(found, expected_q, dtype)
        self.close(k_cache.flatten(0, 1), caches[0], dtype)
        self.close(v_cache.flatten(0, 1), caches[1], dtype)

    def test_a_graph_may_hold_everything(self, dtype: str) -> None:
        """Recorded once, every step computes what it does for other numbers in the same places."""
        if not self.capabilities.cuda_graph or not torch.cuda.is_available():
            pytest.skip("has no CUDA graph")
        ops = self.make()
        weights = [self.draw(128, 64, dtype=dtype, seed=s) / 8 for s in (0, 1)]
        linear, gated, norm = ops.linear(weights[0]), ops.gated_linear(weights[1]), self.draw(64, dtype=dtype)
        caches = [self.draw(8, 4, 2, 16, dtype=dtype) for _ in range(2)]
        slots = torch.tensor([5, 9, 2], device=self.device)
        cos_sin, x, residual = self.draw(3, 16), self.draw(3, 64, dtype=dtype), self.draw(3, 64, dtype=dtype)
        rows = [{"temperature": t, "top_k": k, "top_p": 0.9} for t, k in ((0.0, 0), (1.0, 0), (2.0, 9))]
        batch = sampling_batch(rows, self.device)

        def step() -> tuple[torch.Tensor, ...]:
            qkv = linear(ops.rms_norm(x, norm, 1e-5)).view(3, 8, 16)
            q = ops.rotate_and_store(qkv, cos_sin, caches[0], caches[1], slots)
            normed, added = ops.add_rms_norm(q.flatten(1), residual.clone(), norm, 1e-5)
            activated = gated(normed)
            return activated, added, ops.sample(linear(activated), batch), *caches

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for seed in (7, 8):
            x.copy_(self.draw(3, 64, dtype=dtype, seed=seed))
            residual.copy_(self.draw(3, 64, dtype=dtype, seed=seed + 9))
            batch.position.fill_(seed)
            batch.temperature.copy_(batch.temperature.roll(1))
            graph.replay()
            for one, other in zip([each.clone() for each in found], step(), strict=True):
                assert torch.equal(one, other)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
