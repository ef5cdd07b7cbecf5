"""No setting of the scheduler, the cache or the ranks changes a token.

Prompts share beginnings and have mixed lengths; half are greedy, half sampled. A pool with room for little more than
the longest makes requests give their pages up and be computed anew.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tpserve import LLM, SamplingParams
from tpserve.messages import StepOutput
from tpserve.testing.models import make_model

Settings = dict[str, Any]

TINY = 192
"""Tokens of a pool in which the longest request fills three of three large pages."""

PLAIN: Settings = {
    "cache": "none",
    "chunked_prefill_size": 0,
    "page_size": 16,
    "overlap": False,
    "kv_tokens": 8192,
}
FACTORS: dict[str, list[Any]] = {
    "cache": ["none", "radix"],
    "chunked_prefill_size": [64, 7, 1, 0],
    "page_size": [1, 16, 64],
    "overlap": [False, True],
    "kv_tokens": [TINY, 8192],
}
EVERYTHING = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
PAIRWISE = [
    {
        "cache": FACTORS["cache"][(i + j) % 2],
        "chunked_prefill_size": chunk,
        "page_size": page_size,
        "overlap": FACTORS["overlap"][(i // 2 + j) % 2],
        "kv_tokens": FACTORS["kv_tokens"][(i + i // 2 + j) % 2],
    }
    for i, chunk in enumerate(FACTORS["chunked_prefill_size"])
    for j, page_size in enumerate(FACTORS["page_size"])
]
"""So few of them that each value of each factor meets each value of each other."""

ONE_FACTOR = [PLAIN | {name: value} for name, values in FACTORS.items() for value in values if value != PLAIN[name]]
HARDEST = {"cache": "radix", "chunked_prefill_size": 7, "page_size": 1, "overlap": True, "kv_tokens": TINY}

exhaustive = pytest.mark.skipif(
    not os.environ.get("TPSERVE_TEST_EXHAUSTIVE"), reason="takes half an hour: set TPSERVE_TEST_EXHAUSTIVE=1"
)


def requests(draw: Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """32 prompts of 1 to 130 tokens with four beginnings, each with up to 40 tokens to come."""
    beginnings = [[draw.randrange(3, 300) for _ in range(90)] for _ in range(4)]
    prompts, params = [], []
    for number in range(32):
        beginning = beginnings[number % 4][: draw.choice([0, 5, 33, 50, 90])]
        prompts.append(beginning + [draw.randrange(3, 300) for _ in range(draw.choice([1, 2, 11, 40]))])
        params.append(
            SamplingParams(
                temperature=0.0 if number % 2 else 0.9,
                top_p=draw.choice([1.0, 0.9]),
                seed=number,
                max_tokens=draw.choice([1, 24, 24, 40]),
                ignore_eos=True,
            )
        )
    return prompts, params


PROMPTS, PARAMS = requests(Random(2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return tokens(model, PLAIN)


def tokens(model: Path | str, settings: Settings, tp: int = 1, count: int = len(PROMPTS)) -> list[list[int]]:
    """What the first requests get; a tiny pool has been seen to run dry on the way."""
    options = {"policy.reserve": 0.0}
    outputs: list[StepOutput] = []
    with LLM(model, tp, dtype="float32", threads=1, max_running_requests=12, options=options, **settings) as llm:
        following = llm._engine.next

        def watch() -> StepOutput:
            outputs.append(following())
            return outputs[-1]

        llm._engine.next = watch  # type: ignore[method-assign]
        found = [completion.token_ids for completion in llm.generate(PROMPTS[:count], PARAMS[:count])]
    reports = [output.pool for output in outputs if output.pool]
    is_tiny, is_cached = settings["kv_tokens"] == TINY, settings["cache"] == "radix"
    assert (sum(report.retractions for report in reports) >= 3) == is_tiny, settings
    assert (sum(report.evicted for report in reports) >= 3) == (is_tiny and is_cached), settings
    assert (sum(report.found for report in reports) >= 64) == is_cached, settings
    return found


def test_what_is_expected_can_go_wrong(expected: list[list[int]]) -> None:
    assert len({tuple(each) for each in expected}) > 24
    assert sum(map(len, expected)) > 600


def test_every_pair_of_values_is_among_the_few() -> None:
    def pairs(combinations: list[Settings]) -> set[Any]:
        return {pair for settings in combinations for pair in itertools.combinations(settings.items(), 2)}

    assert pairs(PAIRWISE) == pairs(EVERYTHING)


@pytest.mark.slow
@pytest.mark.parametrize("settings", PAIRWISE, ids=lambda settings: "-".join(map(str, settings.values())))
def test_every_pair_of_values_on_one_rank(model: Path, expected: list[list[int]], settings: Settings) -> None:
    assert tokens(model, settings) == expected


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 3])
def test_the_hardest_on_several_ranks(model: Path, expected: list[list[int]], tp: int) -> None:
    assert tokens(model, HARDEST, tp, count=16) == expected[:16]


@exhaustive
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_every_combination(model: Path, expected: list[list[int]], tp: int) -> None:
    for settings in EVERYTHING:
        assert tokens(model, settings, tp) == expected, settings


@pytest.mark.slow
def test_all_at_once_on_the_embedded_model() -> None:
    assert tokens("", HARDEST, count=8) == tokens("", PLAIN, count=8)


@exhaustive
def test_one_factor_at_a_time_on_the_embedded_model() -> None:
    whole = tokens("", PLAIN)
    for settings in ONE_FACTOR:
        assert tokens("", settings) == whole, settings
    for tp in (2, 3):
        assert tokens("", PLAIN, tp) == whole, f"{tp} ranks"
