"""The small models: the same bytes for the same arguments, any text encoded, and output that wanders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tpserve.models.config import ModelConfig
from tpserve.testing.models import ARCHITECTURES, VOCAB_SIZE, make_model, make_tokenizer


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_wanders(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, architecture))
    prompts = torch.tensor([[5, 80, 61, 200, 7], [90, 91, 92, 93, 94]])
    output = model.generate(prompts, do_sample=False, max_new_tokens=40, eos_token_id=VOCAB_SIZE)[:, 5:]

    for row in output.tolist():
        assert len(set(row)) >= 15
    assert output[0].tolist() != output[1].tolist()


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    files = [make_model(tmp_path / f"{i}", seed=seed) / "model.safetensors" for i, seed in enumerate((1, 1, 2))]
    first, second, third = (file.read_bytes() for file in files)

    assert first == second
    assert first != third


def test_changes_reach_the_config(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_model(tmp_path, "qwen3", dtype="bfloat16", num_hidden_layers=1))

    assert (config.layers, config.dtype, config.q_heads, config.kv_heads) == (1, "bfloat16", 8, 4)
    assert config.eos_ids == (2,)


def test_the_tokenizer_encodes_any_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(make_tokenizer(tmp_path) / "tokenizer.json"))
    text = "Hé, 東京 \U0001f600\n\t!"

    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>the<|im_end|>").ids[0] == 1
    assert len(tokenizer.encode("no").ids) == 1  # letters do merge
    assert "chat_template" in json.loads((tmp_path / "tokenizer_config.json").read_text())
