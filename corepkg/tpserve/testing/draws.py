"""The contract of the draws of ``ops`` as tests, a part of :class:`tpserve.testing.ops.OpsContract`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from tpserve.api.ops import Ops, SamplingBatch
from tpserve.api.specs import OpsCapabilities
from tpserve.ops import noise

__all__ = ["TOLERANCE", "DrawContract", "kept_tokens", "sampling_batch"]

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Of results, by their dtype."""

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


class DrawContract(ABC):
    """Which token each row draws.

    Attributes:
        capabilities: of the spec; dtypes outside them are not run.
        device: where to run.
        vocabularies: numbers of tokens to draw from.
        draws: pairs of seed and position.
        rows: how many draw at once at most.
    """

    capabilities: ClassVar[OpsCapabilities] = OpsCapabilities()
    device: ClassVar[str] = "cpu"
    vocabularies: ClassVar[tuple[int, ...]] = (33, 1500, 4099)
    draws: ClassVar[tuple[tuple[int, int], ...]] = _DRAWS
    rows: ClassVar[int] = 300

    @abstractmethod
    def make(self) -> Ops:
        """Construct the ops."""

    def axes(self) -> dict[str, list[Any]]:
        """What each test is run over, by the names of its arguments."""
        return {
            "dtype": [d for d in TOLERANCE if d in (self.capabilities.dtypes or (d,))],
            "filters": list(_FILTERS),
            "vocabulary": list(self.vocabularies),
            "bad": [math.inf, math.nan, -math.inf],
        }

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test over what the capabilities allow."""
        for name, values in self.axes().items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=str)

    def draw(self, *size: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
        """Random numbers on the device."""
        drawn = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, getattr(torch, dtype))

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

    def test_a_row_that_is_not_finite_draws_a_token_and_spoils_no_other(self, bad: float) -> None:
        """In part or as a whole, with filters and without; which token is not said."""
        good = self.draw(3, 1500)
        for where in (slice(700, 702), slice(None)):
            for how in ({}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}):
                logits = good.clone()
                logits[1, where] = bad
                batch = sampling_batch([{"seed": 1, "position": n, **how} for n in range(3)], self.device)
                found, expected = (self.make().sample(each.clone(), batch).tolist() for each in (logits, good))
                assert 0 <= found[1] < 1500
                assert found[::2] == expected[::2]

    def test_logits_may_be_a_part_of_a_larger_tensor(self, dtype: str) -> None:
        """Rows with a padding, whose numbers are large; with filters too."""
        rows = [{"temperature": t, "top_k": k, "top_p": 0.9} for t in (0.0, 1.0) for k in (0, 5)]
        padded = self.draw(4, 320, dtype=dtype)
        padded[:, 301:] = 100
        self.check_draws(padded[:, :301], rows)

    @pytest.mark.parametrize("greedy", [True, False])
    def test_a_large_vocabulary(self, greedy: bool) -> None:
        """Of tens of thousands of tokens, whose last are the likely ones."""
        rows: list[dict[str, Any]] = [{"temperature": 0.0}] * 2
        if not greedy:
            rows = [rows[0], {"temperature": 5.0, "seed": 3}, {"temperature": 5.0, "seed": 4, **_FILTERS["all"]}]
        logits = self.draw(len(rows), 50_003)
        logits[:, 40_000:] += 20
        self.check_draws(logits, rows)

    def test_hundreds_of_rows(self) -> None:
        """Of which each draws by its own seed, position, temperature and filter."""
        rows = [{"temperature": n % 3, "seed": n, "position": 7 * n, "top_k": 9 * (n % 2)} for n in range(self.rows)]
        self.check_draws(self.draw(len(rows), 40), rows)

    def check_draws(self, logits: torch.Tensor, rows: list[dict[str, Any]]) -> None:
        """Compare with the definition, except where rounding could decide."""
        batch = sampling_batch(rows, self.device)
        expected, clear = _draws(logits.cpu(), sampling_batch(rows))
        dtype, vocabulary = str(logits.dtype).removeprefix("torch."), logits.shape[1]
        found = self.make().sample(logits, batch)
        assert found.dtype == torch.int64, f"the tokens drawn are {found.dtype}, not int64"
        assert clear.sum() >= 0.9 * len(rows)
        for row in (clear & (found.cpu() != expected)).nonzero().flatten().tolist():
            how = ", ".join(f"{name} {value}" for name, value in ({"temperature": 1.0} | rows[row]).items())
            pytest.fail(
                f"row {row} of {len(rows)} ({how}) of {dtype} logits of {vocabulary} tokens draws token "
                f"{int(found[row])}, where the definition in tpserve.api.Ops.sample draws {int(expected[row])}",
                pytrace=False,
            )

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
