"""CUDA graphs of decode: they draw what ordinary steps draw, wait for nothing, and their memory is accounted for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.gpu.engines import TORCH, TRITON_ATTENTION, engine_on
from tests.gpu.waiting import no_waiting

from tpserve.messages import SamplingParams
from tpserve.step import PageWrite, Sequence, SlotParams, Step, TokenWrite
from tpserve.testing.engine import generate
from tpserve.testing.models import make_model

USABLE = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason="needs a CUDA device and triton")]

PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 40, 71, 130)]
GREEDY = [SamplingParams(temperature=0.0)] * 5
PLAIN = [SamplingParams(temperature=0.4 * seed, seed=seed) for seed in range(5)]
FILTERED = [SamplingParams(temperature=1.0, top_p=1 - 0.1 * seed, top_k=seed, seed=seed) for seed in range(5)]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_graphs_draw_what_an_engine_on_the_cpu_draws(architecture: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, architecture)
    cpu, graphs = engine_on("cpu", TORCH, folder), engine_on("cuda", TRITON_ATTENTION, folder, cuda_graph=True)
    for params in (GREEDY, PLAIN, FILTERED):
        expected = generate(cpu, PROMPTS, 150, params)
        assert generate(graphs, PROMPTS, 150, params, chunk=48, shuffle=1) == expected
        for count in (1, 2, 3):
            assert generate(graphs, PROMPTS[:count], 40, params) == [tokens[:40] for tokens in expected[:count]]


def test_steps_are_launched_without_waiting_for_the_device(tmp_path: Path) -> None:
    engine = engine_on("cuda", TRITON_ATTENTION, make_model(tmp_path, "llama"), cuda_graph=True)

    def decode(at: int, *slots: int, pages: int | None = None) -> Step:
        given = [] if pages is None else [PageWrite(slot, 3, [pages + slot]) for slot in slots]
        return Step([Sequence(slot, at, at + 1, sample=True) for slot in slots], pages=given)

    params = [SlotParams(slot, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=slot) for slot in range(3)]
    texts = [TokenWrite(slot, 0, list(range(3, 48))) for slot in range(3)]
    pages = [PageWrite(slot, 0, [3 * slot, 3 * slot + 1, 3 * slot + 2]) for slot in range(3)]
    prompts = [Sequence(slot, 0, 45, sample=True) for slot in range(3)]
    engine.launch(Step(prompts, texts, pages, params)).tokens()
    engine.launch(decode(45, 0, 1, 2)).tokens()
    steps = [
        decode(46, 0, 1, 2),
        decode(47, 0, 1, 2),
        decode(48, 0, 1, 2, pages=20),
        decode(49, 2, 0),
        decode(50, 2, 0),
    ]
    with no_waiting():
        pending = [engine.launch(step) for step in steps]
    assert [len(each.tokens()) for each in pending] == [3, 3, 3, 2, 2]


def test_the_pool_leaves_room_for_steps_and_graphs(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen3", hidden_size=512, intermediate_size=4096, vocab_size=50_000)
    free, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    fraction = (total - free + (3 << 30)) / total
    engine = engine_on(
        "cuda",
        TRITON_ATTENTION,
        folder,
        cuda_graph=True,
        kv_tokens=0,
        memory_fraction=fraction,
        max_context=2048,
        max_running_requests=512,
        max_step_tokens=8192,
    )
    generate(engine, [[3 + n % 40_000 for n in range(1000)] for _ in range(8)], 4)
    used = total - torch.cuda.mem_get_info()[0]
    assert used < fraction * total + (256 << 20)
    assert engine.limits.pages > 1000
