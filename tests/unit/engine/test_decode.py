"""Recorded decode steps do what ordinary steps do. Here a recording calls the work again, where a graph repeats it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tpserve.engine.decode import Recorded
from tpserve.engine.engine import ModelEngine
from tpserve.messages import SamplingParams
from tpserve.step import Engine, PageWrite, Sequence, SlotParams, Step, TokenWrite
from tpserve.testing.engine import generate

PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 40, 71, 130)]
PLAIN = [SamplingParams(temperature=0.4 * seed, seed=seed) for seed in range(5)]
FILTERED = [SamplingParams(temperature=1.0, top_p=1 - 0.1 * seed, top_k=seed, seed=seed) for seed in range(5)]


class Recorder:
    """Counts how often each work is repeated; its result stays where it is."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, work: Callable[[], torch.Tensor]) -> Recorded:
        result = work().clone()

        def again() -> None:
            self.rows.append(len(result))
            result.copy_(work())

        return Recorded(again, result)


def recorded(engine: Engine, *sizes: int) -> Recorder:
    recorder = Recorder()
    assert isinstance(engine, ModelEngine)
    engine.record(sizes, recorder)
    return recorder


@pytest.mark.parametrize("params", [None, PLAIN, FILTERED], ids=["greedy", "plain", "filtered"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_the_same_tokens(name: str, params: list[SamplingParams] | None, small_model: Any, make_engine: Any) -> None:
    folder = small_model(name)
    expected = generate(make_engine(folder), PROMPTS, 24, params)
    engine = make_engine(folder)
    rows = recorded(engine, 1, 2, 4, 8).rows
    assert generate(engine, PROMPTS, 24, params, shuffle=1) == expected
    assert rows == [8] * 23 * (1 if params is FILTERED else 2)
    rows.clear()
    assert generate(engine, PROMPTS, 24, params, chunk=7, shuffle=2) == expected
    assert generate(engine, PROMPTS[:2], 9, params) == [tokens[:9] for tokens in expected[:2]]
    assert 2 in rows


def test_padding_leaves_the_pool_alone(small_model: Any, make_engine: Any) -> None:
    folder = small_model("llama")
    plain, padded = make_engine(folder), make_engine(folder)
    recorded(padded, 8)
    for engine in (plain, padded):
        generate(engine, PROMPTS, 24, shuffle=3)
    for expected, found in zip(plain._caches, padded._caches, strict=True):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one[:-1], other[:-1], rtol=1e-4, atol=1e-5)
    assert torch.equal(plain._state.tokens[:-1], padded._state.tokens[:-1])


def test_batches_that_are_too_large_are_ordinary_steps(small_model: Any, make_engine: Any) -> None:
    engine = make_engine(small_model("qwen3"))
    rows = recorded(engine, 1, 4).rows
    generate(engine, PROMPTS, 5)
    assert rows == []
    generate(engine, PROMPTS[:3], 5)
    assert rows == [4] * 8


def two_prompts() -> Step:
    """Ten tokens each in rows 0 and 1, with two pages each, and a sampled token after them."""
    return Step(
        [Sequence(slot, 0, 10, sample=True) for slot in (0, 1)],
        [TokenWrite(slot, 0, list(range(3 + slot, 13 + slot))) for slot in (0, 1)],
        [PageWrite(slot, 0, [4 * slot, 4 * slot + 1]) for slot in (0, 1)],
        [SlotParams(slot, 1.0, 0, 1.0, 0.0, seed=slot) for slot in (0, 1)],
    )


def test_steps_launched_ahead_and_rows_that_change_hands(small_model: Any, make_engine: Any) -> None:
    """The host reads nothing between steps; a row is given to another request at the very length it had reached."""
    folder = small_model("qwen3")
    drawn = []
    for record in (False, True):
        engine = make_engine(folder)
        if record:
            recorded(engine, 2)
        other = SlotParams(1, 1.0, 2, 0.5, 0.0, seed=9)
        steps = [
            two_prompts(),
            *[Step([Sequence(slot, n, n + 1, sample=True) for slot in (0, 1)]) for n in (10, 11, 12)],
            Step([Sequence(slot, 13, 14, sample=True) for slot in (0, 1)], params=[other]),
            Step([Sequence(slot, 14, 15, sample=True) for slot in (1, 0)]),
        ]
        drawn.append([engine.launch(step).tokens() for step in steps])
    assert drawn[0] == drawn[1]


def test_a_row_that_was_given_away_meanwhile_is_read_anew(small_model: Any, make_engine: Any) -> None:
    """An ordinary step gives a row to a request that filters, which then stands where the other would have stood."""
    folder = small_model("qwen3")
    drawn = []
    for record in (False, True):
        engine = make_engine(folder)
        if record:
            recorded(engine, 2)
        other = Step(
            [Sequence(1, 0, 12, sample=True)],
            [TokenWrite(1, 0, list(range(40, 52)))],
            params=[SlotParams(1, 1.5, 2, 0.5, 0.0, seed=9)],
        )
        steps = [
            two_prompts(),
            *[Step([Sequence(slot, n, n + 1, sample=True) for slot in (0, 1)]) for n in (10, 11)],
            other,
            *[Step([Sequence(slot, n, n + 1, sample=True) for slot in (0, 1)]) for n in (12, 13, 14)],
        ]
        drawn.append([engine.launch(step).tokens() for step in steps])
    assert drawn[0] == drawn[1]


def test_ranks_draw_the_same(small_model: Any, make_engine: Any, on_ranks: Any, tmp_path: Any) -> None:
    def work(engine: Engine) -> list[list[int]]:
        recorded(engine, 4, 8)
        return generate(engine, PROMPTS, 12, PLAIN)

    folder = small_model("llama")
    expected = generate(make_engine(folder), PROMPTS, 12, PLAIN)
    assert [tokens for tokens, _ in on_ranks(folder, 2, tmp_path, work)] == [expected, expected]
