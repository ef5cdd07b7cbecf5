"""Engines on CUDA draw what one on the CPU draws, with each attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.engines import TORCH, TRITON, engine_on
from tests.gpu.waiting import no_waiting

from tpserve.messages import SamplingParams
from tpserve.step import PageWrite, Sequence, SlotParams, Step, TokenWrite
from tpserve.testing.engine import generate
from tpserve.testing.models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("attention", [TORCH, TRITON])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_an_engine_draws_what_it_draws_on_the_cpu(architecture: str, attention: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, architecture)
    cpu, cuda = engine_on("cpu", TORCH, folder), engine_on("cuda", attention, folder)
    prompts = [list(range(3, 3 + length)) for length in (1, 7, 40, 71, 130)]
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in range(5)]
    assert generate(cuda, prompts, 24, chunk=48, shuffle=1) == generate(cpu, prompts, 24)
    assert generate(cuda, prompts, 24, params) == generate(cpu, prompts, 24, params)


@pytest.mark.parametrize("attention", [TORCH, TRITON])
def test_a_step_is_launched_without_waiting_for_the_device(attention: str, tmp_path: Path) -> None:
    engine = engine_on("cuda", attention, make_model(tmp_path, "llama"))

    def admit(slot: int, page: int) -> Step:
        """Admits a sequence, and goes on with the others."""
        params = [SlotParams(slot, temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=slot)]
        tokens, pages = [TokenWrite(slot, 0, list(range(3, 40)))], [PageWrite(slot, 0, [page, page + 1, page + 2])]
        others = [Sequence(other, 37, 38, sample=True) for other in range(slot)]
        return Step([Sequence(slot, 0, 37, sample=True), *others], tokens, pages, params)

    engine.launch(admit(0, 0)).tokens()
    engine.launch(admit(1, 3)).tokens()
    with no_waiting():
        pending = engine.launch(admit(2, 6))
    assert len(pending.tokens()) == 3
