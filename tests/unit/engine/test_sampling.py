"""Sampling through the engine: what a request draws depends on its parameters, seed and text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tpserve.messages import SamplingParams
from tpserve.testing.engine import generate

PROMPTS = [list(range(3, 3 + length)) for length in (2, 30, 9, 64)]
PARAMS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2),
    SamplingParams(temperature=1.5, top_k=20, min_p=0.01, seed=-3),
    SamplingParams(temperature=0.0, seed=4),
]
COUNT = 40


def test_a_request_draws_the_same_alone_and_in_any_company(small_model: Any, make_engine: Any) -> None:
    engine = make_engine(small_model("qwen3"))
    together = generate(engine, PROMPTS, COUNT, PARAMS)
    assert generate(engine, PROMPTS, COUNT, PARAMS, chunk=5, shuffle=9) == together
    assert generate(engine, PROMPTS[::-1], COUNT, PARAMS[::-1]) == together[::-1]
    alone = [generate(engine, [prompt], COUNT, [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert alone == together


def test_a_resumed_request_goes_on_as_it_would_have(small_model: Any, make_engine: Any) -> None:
    engine = make_engine(small_model("llama"))
    whole = generate(engine, PROMPTS, COUNT, PARAMS)
    resumed = [prompt + drawn[:15] for prompt, drawn in zip(PROMPTS, whole, strict=True)]
    assert generate(engine, resumed, COUNT - 15, PARAMS) == [drawn[15:] for drawn in whole]


def test_seeds_matter(small_model: Any, make_engine: Any) -> None:
    engine = make_engine(small_model("llama"))
    params = [SamplingParams(seed=seed) for seed in (0, 1, 2, 0, 2**64)]
    drawn = generate(engine, [PROMPTS[1]] * 5, COUNT, params)
    assert drawn[0] == drawn[3] == drawn[4]
    assert len({tuple(each) for each in drawn}) == 3


def test_ranks_draw_the_same(small_model: Any, on_ranks: Any, make_engine: Any, tmp_path: Path) -> None:
    folder = small_model("llama")
    results = on_ranks(folder, 3, tmp_path, lambda engine: generate(engine, PROMPTS, COUNT, PARAMS, chunk=20))
    expected = generate(make_engine(folder), PROMPTS, COUNT, PARAMS)
    assert [tokens for tokens, _ in results] == [expected] * 3


def test_padding_of_the_vocabulary_is_never_drawn(small_model: Any, on_ranks: Any, tmp_path: Path) -> None:
    params = [SamplingParams(temperature=100.0, seed=seed) for seed in range(8)]
    results = on_ranks(small_model("qwen3"), 4, tmp_path, lambda engine: generate(engine, [[5]] * 8, 60, params))
    tokens, logits = results[0]
    vocabulary = logits[0].shape[1]
    assert vocabulary % (4 * 64) != 0  # so there is padding to draw from
    drawn = torch.tensor(tokens)
    assert int(drawn.max()) < vocabulary
    assert len(drawn.unique()) > vocabulary * 0.7
