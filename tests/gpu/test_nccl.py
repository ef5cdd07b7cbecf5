"""The NCCL comm between CUDA devices: the contract, CUDA graphs, and ranks that draw what one rank draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tpserve import LLM, SamplingParams
from tpserve.api import Comm, CommSpec
from tpserve.plugins.builtin import tpserve_comms
from tpserve.testing.comm import CommContract, Ranks
from tpserve.testing.models import make_model

DEVICES = [f"cuda:{number}" for number in range(torch.cuda.device_count())]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(DEVICES) < 2, reason="needs two CUDA devices")]


class TestNccl(CommContract):
    devices = DEVICES

    @pytest.fixture
    def spec(self) -> CommSpec:
        return next(spec for spec in tpserve_comms() if spec.name == "nccl")

    @pytest.fixture
    def tpserve_guard(self) -> None:
        """CUDA and NCCL keep threads and descriptors of their own."""

    def test_a_graph_repeats_operations(self, ranks: Ranks) -> None:
        """With what its tensors hold at each replay."""

        def work(comm: Comm) -> list[list[float]]:
            device, rank = torch.device(comm.context.device), comm.context.rank
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            x = torch.zeros(2, 3, device=device)
            with torch.cuda.stream(stream):
                comm.all_gather(comm.all_reduce(x.clone()))
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                result = comm.all_gather(comm.all_reduce(x.clone()) + rank)
                graph.capture_end()
                found = []
                for number in range(3):
                    x.fill_(number + rank)
                    graph.replay()
                    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    done.record(stream)
                    comm.wait(done)
                    found.append(result[0].tolist())
            del graph
            return found

        expected = [[2.0 * number + 1.0] * 3 + [2.0 * number + 2.0] * 3 for number in range(3)]
        assert ranks(2, work) == [expected] * 2


@pytest.mark.parametrize(("architecture", "attention"), [("llama", "triton"), ("qwen3", "torch")])
def test_two_ranks_draw_what_one_draws(architecture: str, attention: str, tmp_path: Path) -> None:
    """With CUDA graphs that hold the sums, where the attention allows it."""
    model = make_model(tmp_path, architecture)
    prompts = [list(range(3, 3 + length)) for length in (1, 7, 40, 71, 130)]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    drawn = []
    for ranks in (1, 2):
        settings = {"attn": attention, "comm": "nccl" if ranks > 1 else "auto"}
        with LLM(model, ranks, dtype="float32", kv_tokens=4096, max_running_requests=6, **settings) as llm:
            drawn.append([each.token_ids for each in llm.generate(prompts, greedy)])
    assert drawn[0] == drawn[1]
