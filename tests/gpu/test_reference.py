"""The torch attention and ops on CUDA, and an engine on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tpserve.api import AttentionCapabilities, AttentionShape, NoOptions, OpsCapabilities, SamplingBatch
from tpserve.attention.reference import TorchAttention
from tpserve.config import ServeConfig
from tpserve.distributed.partition import Partition
from tpserve.engine.build import build_engine
from tpserve.messages import SamplingParams
from tpserve.models.config import ModelConfig
from tpserve.ops.reference import TorchOps
from tpserve.step import Engine, PageWrite, Sequence, SlotParams, Step, TokenWrite
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


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_is_launched_without_waiting_for_the_device(tmp_path: Path) -> None:
    engine = engine_on("cuda", make_model(tmp_path, "llama"))

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


def test_a_draw_from_a_large_vocabulary_does_not_wait_for_the_device() -> None:
    ops, device = TorchOps(NoOptions()), torch.device("cuda")
    batch = SamplingBatch(
        temperature=torch.tensor([1.0, 0.7], device=device),
        top_k=torch.tensor([0, 3000], dtype=torch.int32, device=device),
        top_p=torch.tensor([0.99, 1.0], device=device),
        min_p=torch.zeros(2, device=device),
        seed=torch.tensor([1, 2], device=device),
        position=torch.tensor([5, 6], device=device),
        all_greedy=False,
        any_filter=True,
    )
    logits = torch.rand(2, 20_000, device=device)
    expected = ops.sample(logits, batch)
    with no_waiting():
        found = ops.sample(logits, batch)
    assert torch.equal(found, expected)
