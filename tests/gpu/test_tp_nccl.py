"""``--tp N`` with a GPU for each rank draws what one GPU draws; the sums between them are in the CUDA graphs."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tpserve import LLM, SamplingParams
from tpserve.errors import ModelError
from tpserve.testing.models import make_model
from tpserve.weights.source import resolve_model

DEVICES = torch.cuda.device_count()


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 2 or not is_installed("triton"), reason="needs two CUDA devices and triton"),
]

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Ingredients: two eggs, flour, butter. Method:",
    "A ship left the harbour at dawn and met a storm before noon. The crew took in the sails and waited. " * 12,
]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)] * 4
PARAMS.append(SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=48, ignore_eos=True))

Draw = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def default_model() -> Path:
    try:
        return resolve_model("").path
    except ModelError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With KV heads for eight ranks, which the default model has not."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    return make_model(folder, "qwen3", hidden_size=256, num_attention_heads=16, num_key_value_heads=8)


@pytest.fixture(scope="module")
def draw() -> Draw:
    """Draws with an engine of its own for each choice of settings, once."""

    @cache
    def drawn(model: Path, size: int, **settings: Any) -> list[list[int]]:
        given = {"kv_tokens": 8192, "max_running_requests": 6, "comm": "nccl" if size > 1 else "auto", **settings}
        with LLM(model, size, **given) as llm:
            return [each.token_ids for each in llm.generate(TEXTS, PARAMS)]

    return drawn


@pytest.mark.parametrize(
    ("comm", "transport", "library"), [("nccl", "zmq", "zmq"), ("nccl", "nng", "pynng"), ("peer", "zmq", "zmq")]
)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_draw_what_one_draws(
    size: int,
    comm: str,
    transport: str,
    library: str,
    draw: Draw,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if size > DEVICES or not is_installed(library):
        pytest.skip(f"needs {size} CUDA devices and {library}")
    model = request.getfixturevalue("default_model" if size == 2 else "wide_model")
    expected = draw(model, 1, dtype="float32", attn="triton")
    with caplog.at_level(logging.INFO, "tpserve.engine.build"):
        found = draw(model, size, dtype="float32", attn="triton", transport=transport, comm=comm)
    assert "recorded CUDA graphs" in caplog.text
    assert found == expected


@pytest.mark.skipif(not is_installed("flashinfer"), reason="needs flashinfer")
def test_flashinfer_on_two_ranks_says_what_it_says_on_one(default_model: Path, draw: Draw) -> None:
    """It has no float32, and where ranks round otherwise, one word of a text may be another."""
    one, two = (draw(default_model, size, dtype="float16", attn="flashinfer", ops="triton") for size in (1, 2))
    alike = [common(first, second) for first, second in zip(one[:4], two[:4], strict=True)]
    assert sum(alike) > 0.7 * 4 * 48, alike


def common(first: list[int], second: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
