"""The contract of the ``ops`` kind as tests: subclass :class:`OpsContract` and name your implementation.

class TestMine(OpsContract):
    capabilities = plugin.SPEC.capabilities

    def make(self):
        return MyOps(MyOptions())
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from tpserve.api.ops import Ops, SamplingBatch
from tpserve.api.specs import OpsCapabilities
from tpserve.ops import noise

__all__ = ["OpsContract", "kept_tokens", "sampling_batch"]

_TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}

_FILTERS: dict[str, dict[str, float]] = {
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "top_k of all": {"top_k": 5000},
    "top_p": {"top_p": 0.8},
    "small top_p": {"top_p": 0.01},
    "large top_p": {"top_p": 0.9999},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    "top_k and top_p": {"top_k": 20, "top_p": 0.5},
}


_DRAWS = ((0, 0), (-(1 << 63), 1 << 33), (0, 1), (-5, 1), (-5, 500), (1 << 40, 500))
"""Pairs of seed and position."""


def sampling_batch(rows: Sequence[dict[str, Any]], device: str = "cpu") -> SamplingBatch:
    """A batch from one dictionary a row; fields left out: temperature 1, no filter, seed 0, position 0."""
    full = [
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0, **row} for row in rows
    ]

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[name] for row in full], dtype=dtype, device=device)

    return SamplingBatch(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seed=column("seed", torch.int64),
        position=column("position", torch.int64),
        all_greedy=all(row["temperature"] == 0 for row in full),
        any_filter=any(row["top_k"] or row["top_p"] < 1 or row["min_p"] for row in full),
    )


def kept_tokens(scores: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The definition of the filters for one row of logits ÷ temperature: bool ``[vocabulary]``."""
    probabilities = scores.double().softmax(dim=0)
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if top_k:
        ranked = probabilities.sort(descending=True).values
        kept &= probabilities >= ranked[min(top_k, len(ranked)) - 1]
    if top_p < 1:
        left = torch.where(kept, probabilities, 0)
        ranked = (left / left.sum()).sort(descending=True).values
        nucleus = int((ranked.cumsum(0) - ranked < top_p).sum())
        kept &= left / left.sum() >= ranked[nucleus - 1]
    return kept & (probabilities >= min_p * probabilities.max())


class OpsContract(ABC):
    """What every set of ops must compute.

    Attributes:
        capabilities: of the spec; dtypes outside them are not run, and a CUDA graph only if it can hold them.
        device: where to run.
        tokens: numbers of rows.
        vocabularies: numbers of tokens to draw from.
        draws: pairs of seed and position.
    """

    capabilities: ClassVar[OpsCapabilities] = OpsCapabilities()
    device: ClassVar[str] = "cpu"
    tokens: ClassVar[tuple[int, ...]] = (1, 2, 16, 67)
    vocabularies: ClassVar[tuple[int, ...]] = (33, 1500, 4099)
    draws: ClassVar[tuple[tuple[int, int], ...]] = _DRAWS

    @abstractmethod
    def make(self) -> Ops:
        """Construct the ops."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test over what the capabilities allow."""
        offered = self.capabilities
        axes: dict[str, list[Any]] = {
            "dtype": [d for d in _TOLERANCE if d in (offered.dtypes or (d,))],
            "tokens": list(self.tokens),
            "head_dim": [16, 64, 80, 128],
            "normed": [False, True],
            "bias": [False, True],
            "filters": list(_FILTERS),
            "vocabulary": list(self.vocabularies),
            "size": [2, 100, 3000],
            "heads": [(1, 1), (3, 1), (14, 2), (5, 5)],
            "shape": [(33, 40), (70, 1500), (130, 1024)],
        }
        for name, values in axes.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=str)

    def draw(self, *size: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
        """Random numbers on the device."""
        drawn = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, getattr(torch, dtype))

    def close(self, found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
        """Compare with a float64 result, as far as the dtype goes."""
        assert found.dtype == getattr(torch, dtype)
        tolerance = _TOLERANCE[dtype]
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
        tolerance = 3 * _TOLERANCE[dtype]
        torch.testing.assert_close(found.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=tolerance)

    def test_linear_takes_any_number_of_rows(self) -> None:
        """One product serves every batch size, none included, and rows that are a view."""
        weight = self.draw(96, 64)
        linear = self.make().linear(weight)
        for rows in (0, 1, 3, 1, 40, 3):
            x = self.draw(rows, 128, seed=rows)[:, 64:]
            torch.testing.assert_close(linear(x), x @ weight.T, rtol=1e-4, atol=1e-4)

    def test_rms_norm(self, dtype: str, tokens: int) -> None:
        """The definition: x / sqrt(mean(x²) + eps) · weight; eps matters for small rows."""
        x, weight = self.draw(tokens, 96, dtype=dtype), self.draw(96, dtype=dtype, seed=1)
        x[0] *= 1e-3
        self.close(self.make().rms_norm(x, weight, 1e-5), _rms_norm(x, weight, 1e-5), dtype)

    def test_rms_norm_sizes(self, size: int) -> None:
        """Sizes that are no powers of two; large numbers, whose squares do not overflow."""
        x, weight = self.draw(3, size) * 1e4, self.draw(size, seed=1)
        x[1] = 1
        self.close(self.make().rms_norm(x, weight, 1e-5), _rms_norm(x, weight, 1e-5), "float32")

    def test_add_rms_norm(self, dtype: str, tokens: int) -> None:
        """The sum, and the norm of the sum."""
        x, residual, weight = (self.draw(tokens, 96, dtype=dtype, seed=s) for s in (0, 1, 2))
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
        (q_heads, kv_heads), page_size = heads, 4
        qkv = self.draw(tokens, q_heads + 2 * kv_heads, head_dim, dtype=dtype)
        q_norm, k_norm = (self.draw(head_dim, dtype=dtype, seed=s) if normed else None for s in (1, 2))
        angles = self.draw(tokens, head_dim // 2, seed=3) * 3
        k_cache, v_cache = (self.draw(32, page_size, kv_heads, head_dim, dtype=dtype, seed=s) for s in (4, 5))
        slots = torch.randperm(32 * page_size, generator=torch.Generator().manual_seed(6))[:tokens].to(self.device)
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

    def test_greedy_takes_the_first_of_the_largest(self, dtype: str) -> None:
        """Ties go to the smallest token id, wherever they lie."""
        for first, second in ((0, 1), (5, 4098), (1000, 3000), (4097, 4098)):
            logits = self.draw(3, 4099, dtype=dtype).clamp_(max=4)
            logits[:, first] = logits[:, second] = 10
            found = self.make().sample(logits, sampling_batch([{"temperature": 0.0}] * 3, self.device))
            assert found.dtype == torch.int64
            assert found.tolist() == [first] * 3
            mixed = sampling_batch([{"temperature": 0.0}, {"temperature": 1e-7}, {"temperature": 0.0}], self.device)
            assert self.make().sample(logits, mixed).tolist()[::2] == [first] * 2

    def test_sample(self, vocabulary: int, dtype: str) -> None:
        """The argmax of logit ÷ temperature + noise; rows with different parameters in one batch."""
        rows = [{"temperature": t, "seed": s, "position": p} for t in (0.0, 1e-7, 0.3, 1.0, 5.0) for s, p in self.draws]
        self.check_draws(self.draw(len(rows), vocabulary, dtype=dtype) * 3, rows)

    def test_sample_filters(self, filters: str, vocabulary: int) -> None:
        """Only what the filters keep is drawn, at several temperatures and beside rows without filters."""
        rows = [
            {"temperature": t, "seed": s, "position": p, **(_FILTERS[filters] if n % 3 else {})}
            for t in (0.0, 0.5, 20.0)
            for n, (s, p) in enumerate(self.draws)
        ]
        self.check_draws(self.draw(len(rows), vocabulary) * 3, rows)

    def test_equal_tokens_stay_or_go_together(self, filters: str) -> None:
        """Few different logits, so that each threshold lies on many tokens."""
        rows = [
            {"temperature": 9.0 if n % 2 else 1.0, "seed": s, "position": p, **_FILTERS[filters]}
            for n, (s, p) in enumerate(self.draws)
        ]
        self.check_draws((self.draw(len(rows), 600) * 2).round(), rows)

    def test_a_token_without_a_chance_is_not_drawn(self, filters: str) -> None:
        """Logits of -inf, most of a row or all but one, with filters that would keep more; beside rows of others."""
        rows = [{"temperature": 3.0, "seed": seed, **_FILTERS[filters]} for seed in range(3)]
        logits = self.draw(len(rows), 900)
        logits[1:, 3:897] = -torch.inf
        logits[2, :] = -torch.inf
        logits[2, 450] = -40.0
        self.check_draws(logits, rows)

    def test_logits_may_be_a_part_of_a_larger_tensor(self, dtype: str) -> None:
        """Rows with a padding, whose numbers are large; with filters too."""
        rows = [{"temperature": t, "top_k": k, "top_p": 0.9} for t in (0.0, 1.0) for k in (0, 5)]
        padded = self.draw(4, 320, dtype=dtype)
        padded[:, 301:] = 100
        self.check_draws(padded[:, :301], rows)

    def check_draws(self, logits: torch.Tensor, rows: list[dict[str, Any]]) -> None:
        """Compare with the definition, except where rounding could decide."""
        batch = sampling_batch(rows, self.device)
        expected, clear = _draws(logits.cpu(), sampling_batch(rows))
        found = self.make().sample(logits, batch)
        assert found.dtype == torch.int64
        assert clear.sum() >= 0.9 * len(rows)
        assert found.cpu()[clear].tolist() == expected[clear].tolist()

    def test_batch_mates_change_nothing(self) -> None:
        """A row alone, and the same row among others, draws the same token."""
        rows = [
            {
                "temperature": 0.5 + n % 3,
                "seed": n,
                "position": n * n,
                "top_k": 10 * (n % 2),
                "top_p": 1 - 0.3 * (n % 4 == 1),
            }
            for n in range(6)
        ]
        logits = self.draw(6, 700) * 2
        together = self.make().sample(logits.clone(), sampling_batch(rows, self.device)).tolist()
        backwards = self.make().sample(logits.flip(0), sampling_batch(rows[::-1], self.device)).tolist()
        alone = [
            self.make().sample(logits[n : n + 1].clone(), sampling_batch([rows[n]], self.device)).item()
            for n in range(6)
        ]
        assert together == backwards[::-1] == alone

    def test_a_graph_may_hold_everything(self, dtype: str) -> None:
        """Recorded once, every step computes what it does for other numbers in the same places."""
        if not self.capabilities.cuda_graph or not torch.cuda.is_available():
            pytest.skip("for what a CUDA graph can hold")
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


def _draws(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each row by definition, in float64, and where the runner-up is clearly behind."""
    uniform = noise.uniforms(noise.row_keys(batch.seed, batch.position), logits.shape[1]).double()
    gumbel = -(-uniform.log()).log()
    tokens, clear = [], []
    for row in range(len(logits)):
        temperature = float(batch.temperature[row])
        scores = logits[row].double()
        if temperature:
            scores = scores / temperature
            kept = kept_tokens(scores, int(batch.top_k[row]), float(batch.top_p[row]), float(batch.min_p[row]))
            scores = torch.where(kept, scores + gumbel[row], -torch.inf)
        best = scores.topk(2).values
        tokens.append(int(scores.argmax()))
        clear.append(not temperature or bool(best[0] - best[1] > 1e-4))
    return torch.tensor(tokens), torch.tensor(clear)
