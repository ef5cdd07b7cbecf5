"""Greedy output equals that of transformers, token for token, in float32."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tpserve.api import Linear, NoOptions
from tpserve.ops.reference import TorchOps
from tpserve.step import Engine, EngineLimits
from tpserve.testing.engine import generate
from tpserve.testing.models import VOCAB_SIZE

MODELS = ["llama", "mistral", "qwen2", "qwen3", "llama3"]
COUNT = 24


def prompts_of(*lengths: int) -> list[list[int]]:
    random = Random(5)
    return [[random.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of(1, 7, 40, 71, 130)


@pytest.mark.parametrize("name", MODELS)
def test_alone_and_together(name: str, small_model: Any, truth: Any, make_engine: Any) -> None:
    folder = small_model(name)
    expected = truth(folder, PROMPTS, COUNT)
    engine = make_engine(folder)
    assert generate(engine, PROMPTS, COUNT) == expected
    assert [generate(engine, [prompt], COUNT)[0] for prompt in PROMPTS] == expected


class PartedOps(TorchOps):
    """Leaves it to what follows to add up what products have of either half of their columns."""

    def __init__(self) -> None:
        super().__init__(NoOptions())
        self.added = 0

    def linear_in_parts(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        first, second = (self.linear(half.contiguous()) for half in weight.chunk(2, dim=1))
        return lambda x: torch.stack(
            [each(half) for each, half in zip((first, second), x.chunk(2, dim=1), strict=True)]
        )

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.added += 1
        assert x.shape == (2, *residual.shape)
        return super().add_rms_norm(x.sum(0), residual, weight, eps)

    def rotate_and_store(self, qkv: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        assert qkv.dim() == 4
        return super().rotate_and_store(qkv.sum(0), *others, **named)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_products_in_parts(name: str, small_model: Any, truth: Any, make_engine: Any) -> None:
    folder, ops = small_model(name), PartedOps()
    assert generate(make_engine(folder, ops), PROMPTS, COUNT, chunk=48) == truth(folder, PROMPTS, COUNT)
    assert ops.added


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_in_pieces(name: str, chunk: int, small_model: Any, truth: Any, make_engine: Any) -> None:
    folder = small_model(name)
    found = generate(make_engine(folder), PROMPTS, COUNT, chunk=chunk, shuffle=1)
    assert found == truth(folder, PROMPTS, COUNT)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_page_sizes(name: str, page_size: int, small_model: Any, truth: Any, make_engine: Any) -> None:
    folder = small_model(name)
    engine = make_engine(folder, page_size=page_size)
    assert generate(engine, PROMPTS, COUNT, chunk=48, shuffle=2) == truth(folder, PROMPTS, COUNT)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", 2),
        ("llama", 3),
        ("mistral", 2),
        ("mistral", 4),
        ("qwen2", 2),
        ("qwen2", 4),
        ("qwen3", 2),
        ("qwen3", 4),
    ],
)
def test_ranks_agree_in_every_bit(
    name: str, size: int, small_model: Any, truth: Any, on_ranks: Any, tmp_path: Path
) -> None:
    def work(engine: Engine) -> tuple[list[list[int]], EngineLimits]:
        return generate(engine, PROMPTS, COUNT, chunk=50), engine.limits

    folder = small_model(name)
    results = on_ranks(folder, size, tmp_path, work)
    (tokens, limits), logits = results[0]
    assert tokens == truth(folder, PROMPTS, COUNT)
    for (other_tokens, other_limits), other_logits in results[1:]:
        assert (other_tokens, other_limits) == (tokens, limits)
        assert all(torch.equal(a, b) for a, b in zip(logits, other_logits, strict=True))
    assert logits[0].shape[1] == VOCAB_SIZE
