"""Rotary tables, against those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tpserve.models.config import ModelConfig, Rope
from tpserve.models.rope import inverse_frequencies, rotary_table

ORIGINAL = {"original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0, **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, **ORIGINAL},
    ],
)
def test_tables_equal_those_of_transformers(tmp_path: Path, parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 50000.0, **parameters},
    )
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_folder(tmp_path)
    positions = torch.arange(2048)

    cosines, sines = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    table = rotary_table(ours.rope, ours.head_dim, 2048)

    torch.testing.assert_close(table[:, :32], cosines[0, :, :32], rtol=0, atol=2e-5)
    torch.testing.assert_close(table[:, 32:], sines[0, :, :32], rtol=0, atol=2e-5)


def test_the_table_is_exact_at_small_angles() -> None:
    table = rotary_table(Rope(theta=10000.0), 4, 3)

    angles = torch.tensor([[0.0, 0.0], [1.0, 0.01], [2.0, 0.02]])
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), dim=1))
    assert table.dtype == torch.float32


def test_frequencies_fall_from_one_radian_a_token() -> None:
    frequencies = inverse_frequencies(Rope(theta=100.0), 8)

    torch.testing.assert_close(frequencies, torch.tensor([1.0, 100**-0.25, 0.1, 100**-0.75]))
