"""Greedy output equals that of ``transformers``, token for token: alone, in company, over several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tpserve import LLM, SamplingParams
from tpserve.bench.server import serving
from tpserve.frontend.text import TextCodec
from tpserve.testing.models import make_model
from tpserve.weights.source import resolve_model

MAX_TOKENS = 64
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Ingredients: two eggs, flour, butter. Method:",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: Why is the sky blue?\nA:",
    "Wasser ist",
    "<html>\n<head>\n<title>",
    "The three laws of motion are",
)
LONG = (
    "A ship left the harbour at dawn and met a storm before noon. The crew took in the sails and waited. " * 26,
    "Item {0}: a red lamp, a blue chair, a table of oak. " * 45 + "In short,",
)


class Oracle:
    """``transformers`` in float32.

    One pass over prompt and output says what is likeliest after each beginning. An output that is exactly that, token
    by token, is what greedy generation makes: its first token is right, and each next one after right ones.
    """

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()
        self._asked: dict[tuple[int, ...], list[int]] = {}

    def likeliest(self, prompt: list[int], output: list[int]) -> list[int]:
        """The likeliest token in the place of each of ``output``, after the prompt and those before it."""
        text = (*prompt, *output)
        if text not in self._asked:
            self._asked[text] = self._ask(prompt, output)
        return self._asked[text]

    def _ask(self, prompt: list[int], output: list[int]) -> list[int]:
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)).logits[0]
        return logits.argmax(dim=-1).tolist()


def complete(url: str, prompt: list[int]) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False)
    response.raise_for_status()
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    return choice["token_ids"]


def complete_together(url: str, prompts: Sequence[list[int]], streams: int = 8) -> list[list[int]]:
    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(lambda prompt: complete(url, prompt), prompts))


def assert_greedy(oracle: Oracle, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == MAX_TOKENS
        assert output == oracle.likeliest(prompt, output)


@pytest.fixture(scope="module")
def default_model() -> tuple[list[list[int]], Oracle]:
    """Prompts for the default model, and what transformers makes of them."""
    folder = resolve_model("").path
    codec = TextCodec.from_folder(folder)
    prompts = [codec.encode(text) for text in (*TEXTS, *LONG)]
    assert len(prompts) >= 12
    assert sum(len(prompt) > 500 for prompt in prompts) >= 2
    return prompts, Oracle(folder)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_the_default_model_says_what_transformers_says(tp: int, default_model: tuple[list[list[int]], Oracle]) -> None:
    prompts, oracle = default_model
    with serving(["--tp", str(tp), "--transport", "zmq", "--dtype", "float32"]) as url:
        alone = [complete(url, prompt) for prompt in prompts]
        together = complete_together(url, prompts)

    assert_greedy(oracle, prompts, alone)
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "qwen2"])
def test_small_models_say_what_transformers_says(architecture: str, tp: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / architecture, architecture)
    prompts = [
        [(7 * i * i + 3 * n) % 300 + 3 for i in range(length)] for n, length in enumerate((1, 5, 17, 64, 130, 600))
    ]
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(folder, tp=tp, transport="zmq", dtype="float32") as llm:
        alone = [each.token_ids for prompt in prompts[:2] for each in llm.generate([prompt], greedy)]
        together = [each.token_ids for each in llm.generate(prompts, greedy)]

    assert_greedy(Oracle(folder), prompts, together)
    assert together[:2] == alone
