"""Two ranks on one GPU, with gloo between them, draw what one rank draws."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tpserve.messages import SamplingParams
from tpserve.offline import LLM
from tpserve.testing.models import make_model

USABLE = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason="needs a CUDA device and triton")]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_two_ranks_draw_what_one_draws(architecture: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, architecture)
    prompts = [list(range(3, 3 + length)) for length in (1, 7, 40, 71, 130)]
    params = [SamplingParams(temperature=0.5 * n, seed=n, max_tokens=24, ignore_eos=True) for n in range(5)]
    drawn = []
    for parts in ({"tp": 1}, {"tp": 2, "comm": "gloo", "device_step": 0}):
        with LLM(folder, attn="triton", device="cuda", dtype="float32", kv_tokens=4096, **parts) as llm:
            drawn.append([each.token_ids for each in llm.generate(prompts, params)])
    assert drawn[0] == drawn[1]
