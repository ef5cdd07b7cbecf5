"""The embedded model on CUDA, with CUDA graphs: what transformers generates, and what is lost in bfloat16."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from tests.gpu.engines import TRITON_ATTENTION, engine_on

from tpserve.api import NoOptions, SamplingBatch
from tpserve.errors import ModelError
from tpserve.frontend.text import TextCodec
from tpserve.ops.reference import TorchOps
from tpserve.step import PageWrite, Sequence, SlotParams, Step, TokenWrite
from tpserve.testing.engine import generate
from tpserve.weights.source import resolve_model

USABLE = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason="needs a CUDA device and triton")]

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Photosynthesis is the process by which plants",
    "In 1969, two people walked on the Moon for the first time. Their names were",
]

TEXT = """\
The sea is never quite still. Even on a calm day, when the wind has dropped and the sails hang empty, a long low swell
comes in from somewhere beyond the horizon, the last trace of a storm that nobody on the coast has heard of. Fishermen
learn to read it before they learn to read a book. They can tell from its direction where the bad weather was, and from
the time between two crests how far away. A short, steep sea means that the wind is near; a slow one that lifts the boat
gently and sets it down again has travelled for days. Long before there were barometers and forecasts on the radio, this
was how a village knew whether to put out in the morning or to stay at home and mend the nets. The old people say that
the swell speaks, and that it has never told a lie, although it does not always tell the whole truth.
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return resolve_model("").path
    except ModelError as error:
        pytest.skip(error.message)


class ListeningOps(TorchOps):
    """Keeps the logits of the last single draw, in a graph too."""

    def __init__(self) -> None:
        super().__init__(NoOptions())
        self.heard: torch.Tensor | None = None

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if len(logits) == 1:
            if self.heard is None:
                self.heard = torch.zeros(logits.shape, device=logits.device)
            self.heard.copy_(logits)
        return super().sample(logits, batch)


def test_greedy_output_is_that_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    codec = TextCodec.from_folder(folder)
    prompts = [codec.encode(prompt) for prompt in PROMPTS]
    truth = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    settings = {"do_sample": False, "max_new_tokens": 64, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        outputs = [truth.generate(torch.tensor([prompt], device="cuda"), **settings)[0].tolist() for prompt in prompts]
    engine = engine_on("cuda", TRITON_ATTENTION, folder, cuda_graph=True)
    expected = [output[len(prompt) :] for output, prompt in zip(outputs, prompts, strict=True)]
    assert generate(engine, prompts, 64) == expected
    assert [generate(engine, [prompt], 64)[0] for prompt in prompts] == expected


def test_bfloat16_loses_less_than_a_percent_of_perplexity(folder: Path) -> None:
    tokens = TextCodec.from_folder(folder).encode(TEXT)
    exact, coarse = (perplexity(folder, tokens, dtype) for dtype in ("float32", "bfloat16"))
    assert 1 < exact < 100
    assert coarse == pytest.approx(exact, rel=0.01)


def perplexity(folder: Path, tokens: list[int], dtype: str) -> float:
    """Of a text that is decoded token by token, each drawn one replaced by the text's own."""
    ops = ListeningOps()
    engine = engine_on("cuda", TRITON_ATTENTION, folder, ops, dtype=dtype, cuda_graph=True)
    pages = [PageWrite(0, 0, list(range(-(-len(tokens) // engine.limits.page_size))))]
    params = [SlotParams(0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)]
    loss = 0.0
    for position, following in enumerate(tokens[1:]):
        write = [TokenWrite(0, position, [tokens[position]])]
        engine.launch(Step([Sequence(0, position, position + 1, sample=True)], write, pages, params)).tokens()
        pages, params = [], []
        assert ops.heard is not None
        loss -= ops.heard[0].log_softmax(dim=0)[following].item()
    return math.exp(loss / (len(tokens) - 1))
