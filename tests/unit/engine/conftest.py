"""Engines on small random models, on one rank or on several threads that are ranks, and what transformers generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tpserve.api import CommContext, NoOptions, SamplingBatch
from tpserve.attention.reference import TorchAttention
from tpserve.comm.gloo import GlooComm
from tpserve.config import ServeConfig
from tpserve.distributed.partition import Partition
from tpserve.engine.build import build_engine
from tpserve.models.config import ModelConfig
from tpserve.ops.reference import TorchOps
from tpserve.step import Engine
from tpserve.testing.models import make_model

MakeEngine = Callable[..., Engine]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_context": 512, "max_running_requests": 8, "kv_tokens": 2048}


class ListeningOps(TorchOps):
    """Keeps the logits that it draws from."""

    def __init__(self) -> None:
        super().__init__(NoOptions())
        self.heard: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        self.heard.append(logits.clone())
        return super().sample(logits, batch)


def engine_of(folder: Path, ops: TorchOps | None = None, comm: GlooComm | None = None, **settings: Any) -> Engine:
    """An engine; ``settings`` change SETTINGS."""
    model = ModelConfig.from_folder(folder)
    size, rank = (comm.context.size, comm.context.rank) if comm else (1, 0)
    return build_engine(
        ServeConfig(**{**SETTINGS, **settings}),
        model,
        folder,
        Partition.of(model, size, rank),
        "cpu",
        lambda shape: TorchAttention(NoOptions(), shape),
        ops or TorchOps(NoOptions()),
        (lambda: comm) if comm else None,
    )


@pytest.fixture(scope="session")
def make_engine() -> MakeEngine:
    """Build an engine from a folder."""
    return engine_of


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[tuple[Any, list[torch.Tensor]]]]:
    """Call ``work(engine)`` on each of ``size`` ranks: what each returned, and the logits that it drew from."""

    def run(
        folder: Path, size: int, run_dir: Path, work: Callable[[Engine], Any], **settings: Any
    ) -> list[tuple[Any, list[torch.Tensor]]]:
        def rank(number: int) -> tuple[Any, list[torch.Tensor]]:
            ops = ListeningOps()
            comm = GlooComm(NoOptions(), CommContext(number, size, run_dir, "comm", "cpu", 60.0))
            engine = engine_of(folder, ops, comm, **settings)
            try:
                return work(engine), ops.heard
            finally:
                engine.close()

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(rank, range(size)))

    return run


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small random model: an architecture, or ``llama3`` for a Llama with that rope scaling."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if name == "llama3":
            rope = {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
            return make_model(folder, "llama", rope_parameters=rope)
        return make_model(folder, name)

    return make


@pytest.fixture(scope="session")
def truth() -> Callable[[Path, Sequence[list[int]], int], list[list[int]]]:
    """What transformers continues each prompt with, alone, greedily, past the end of text."""
    from transformers import AutoModelForCausalLM

    @cache
    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(folder: Path, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
        outputs = (load(folder).generate(torch.tensor([prompt]), **settings) for prompt in prompts)
        return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]

    return greedy
