"""No setting of the scheduler, the cache or the ranks changes a token: every combination on a small model.

Prompts share beginnings and have mixed lengths; half are greedy, half sampled. A pool too small for all makes requests
give their pages up and be computed anew.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tpserve import LLM, SamplingParams
from tpserve.testing.models import make_model

PLAIN: dict[str, Any] = {
    "cache": "none",
    "chunked_prefill_size": 0,
    "page_size": 16,
    "overlap": False,
    "kv_tokens": 8192,
}
FACTORS: dict[str, list[Any]] = {
    "cache": ["none", "radix"],
    "chunked_prefill_size": [1, 7, 64, 0],
    "page_size": [1, 16, 64],
    "overlap": [False, True],
    "kv_tokens": [320, 8192],
}
EVERYTHING = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
ONE_FACTOR = [PLAIN | {name: value} for name, values in FACTORS.items() for value in values if value != PLAIN[name]]
HARDEST = {"cache": "radix", "chunked_prefill_size": 7, "page_size": 1, "overlap": True, "kv_tokens": 320}

exhaustive = pytest.mark.skipif(
    not os.environ.get("TPSERVE_TEST_EXHAUSTIVE"), reason="takes half an hour: set TPSERVE_TEST_EXHAUSTIVE=1"
)


def requests(draw: Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """32 prompts of 1 to 150 tokens with four beginnings, each with up to 24 tokens to come."""
    beginnings = [[draw.randrange(3, 300) for _ in range(90)] for _ in range(4)]
    prompts, params = [], []
    for number in range(32):
        beginning = beginnings[number % 4][: draw.choice([0, 5, 33, 64, 90])]
        prompts.append(beginning + [draw.randrange(3, 300) for _ in range(draw.choice([1, 2, 17, 60]))])
        params.append(
            SamplingParams(
                temperature=0.0 if number % 2 else 0.9,
                top_p=draw.choice([1.0, 0.9]),
                seed=number,
                max_tokens=draw.choice([1, 2, 11, 24]),
                ignore_eos=True,
            )
        )
    return prompts, params


PROMPTS, PARAMS = requests(Random(4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return tokens(model, PLAIN)


def tokens(model: Path | str, settings: dict[str, Any], tp: int = 1) -> list[list[int]]:
    options = {"policy.reserve": 0.0}
    with LLM(model, tp, dtype="float32", threads=1, max_running_requests=12, options=options, **settings) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]


def test_what_is_expected_can_go_wrong(expected: list[list[int]]) -> None:
    assert len({tuple(each) for each in expected}) > 24
    assert sum(map(len, expected)) > 250


@pytest.mark.slow
@pytest.mark.parametrize("cache", FACTORS["cache"])
@pytest.mark.parametrize("overlap", FACTORS["overlap"])
def test_every_combination_on_one_rank(model: Path, expected: list[list[int]], cache: str, overlap: bool) -> None:
    for settings in EVERYTHING:
        if settings["cache"] == cache and settings["overlap"] == overlap:
            assert tokens(model, settings) == expected, settings


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("settings", [PLAIN, HARDEST], ids=["plain", "hardest"])
def test_several_ranks(model: Path, expected: list[list[int]], tp: int, settings: dict[str, Any]) -> None:
    assert tokens(model, settings, tp) == expected


@exhaustive
@pytest.mark.parametrize("tp", [2, 3])
def test_every_combination_on_several_ranks(model: Path, expected: list[list[int]], tp: int) -> None:
    for settings in EVERYTHING:
        assert tokens(model, settings, tp) == expected, settings


@pytest.mark.slow
def test_all_at_once_on_the_embedded_model() -> None:
    assert tokens("", HARDEST) == tokens("", PLAIN)


@exhaustive
def test_one_factor_at_a_time_on_the_embedded_model() -> None:
    whole = tokens("", PLAIN)
    for settings in ONE_FACTOR:
        assert tokens("", settings) == whole, settings
    for tp in (2, 3):
        assert tokens("", PLAIN, tp) == whole, f"{tp} ranks"
