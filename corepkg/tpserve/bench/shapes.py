"""Shapes of well-known models, for benchmarks with dummy weights: a config.json and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

__all__ = ["SHAPES", "write_shape"]

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rope_theta": 500000,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
    },
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25600,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
    },
}
"""The parts of each model's config.json that say what is computed."""

_COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}


def write_shape(name: str, folder: Path) -> Path:
    """Write the config.json of a key of :data:`SHAPES` into a folder, made if need be, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(SHAPES[name] | _COMMON)))
    return folder
