"""No transport and no synchronisation changes a token: at two ranks, on a small model.

Each transport and each synchronisation has its turn; every combination has with TPSERVE_TEST_EXHAUSTIVE=1, and
test_rank_io lets them carry messages without a model.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpserve import LLM, SamplingParams
from tpserve.testing.models import make_model

TRANSPORTS = ("zmq", "nng", "gloo")
SYNCS = ("gloo", "inband", "shm")
exhaustive = pytest.mark.skipif(
    not os.environ.get("TPSERVE_TEST_EXHAUSTIVE"), reason="every combination: set TPSERVE_TEST_EXHAUSTIVE=1"
)

PROMPTS = [[3 + (7 * number + place) % 290 for place in range(1 + 9 * number)] for number in range(12)]
PARAMS = [
    SamplingParams(temperature=0.9 * (number % 2), seed=number, max_tokens=12, ignore_eos=True) for number in range(12)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    tokens = answer(model, tp=1)
    assert len({tuple(each) for each in tokens}) > 8
    return tokens


def answer(model: Path, tp: int, **links: str) -> list[list[int]]:
    with LLM(model, tp, dtype="float32", threads=1, kv_tokens=4096, **links) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    ("transport", "sync"),
    [
        pytest.param(transport, sync, marks=() if (i + j) % 3 == 2 else exhaustive)
        for i, transport in enumerate(TRANSPORTS)
        for j, sync in enumerate(SYNCS)
    ],
)
def test_the_tokens_are_the_same(model: Path, expected: list[list[int]], transport: str, sync: str) -> None:
    assert answer(model, 2, transport=transport, pipe_transport="zmq", sync=sync) == expected
