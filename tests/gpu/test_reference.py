"""The torch attention and ops on CUDA, and an engine on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tpserve.api import AttentionCapabilities, AttentionShape, NoOptions, OpsCapabilities
from tpserve.attention.reference import TorchAttention
from tpserve.config import ServeConfig
from tpserve.distributed.partition import Partition
from tpserve.engine.build import build_engine
from tpserve.messages import SamplingParams
from tpserve.models.config import ModelConfig
from tpserve.ops.reference import TorchOps
from tpserve.step import Engine
from tpserve.testing.attention import AttentionContract
from tpserve.testing.engine import generate
from tpserve.testing.models import make_model
from tpserve.testing.ops import OpsContract

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestTorchAttention(AttentionContract):
    capabilities = AttentionCapabilities(devices=("cuda",), sliding_window=True)
    device = "cuda"

    def make(self, shape: AttentionShape) -> TorchAttention:
        return TorchAttention(NoOptions(), shape)


class TestTorchOps(OpsContract):
    capabilities = OpsCapabilities(devices=("cuda",))
    device = "cuda"

    def make(self) -> TorchOps:
        return TorchOps(NoOptions())


def engine_on(device: str, folder: Path) -> Engine:
    model = ModelConfig.from_folder(folder)
    config = ServeConfig(dtype="float32", max_context=512, max_running_requests=8, kv_tokens=2048)
    return build_engine(
        config,
        model,
        folder,
        Partition.of(model, 1, 0),
        device,
        lambda shape: TorchAttention(NoOptions(), shape),
        TorchOps(NoOptions()),
        None,
    )


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_an_engine_draws_what_it_draws_on_the_cpu(architecture: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, architecture)
    cpu, cuda = engine_on("cpu", folder), engine_on("cuda", folder)
    prompts = [list(range(3, 3 + length)) for length in (1, 7, 40, 71, 130)]
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in range(5)]
    assert generate(cuda, prompts, 24, chunk=48, shuffle=1) == generate(cpu, prompts, 24)
    assert generate(cuda, prompts, 24, params) == generate(cpu, prompts, 24, params)
