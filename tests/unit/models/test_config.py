"""Model shapes from config.json, as transformers 5 writes it and as older ones did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpserve.errors import ModelError
from tpserve.models.config import ModelConfig, Rope

BASE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def read(
    folder: Path, architecture: str = "llama", generation: dict[str, Any] | None = None, **keys: Any
) -> ModelConfig:
    values = {**BASE, "architectures": [f"{NAMES[architecture]}ForCausalLM"], "model_type": architecture, **keys}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def refusal(folder: Path, architecture: str = "llama", **keys: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read(folder, architecture, **keys)
    return caught.value


def test_an_old_llama_file(tmp_path: Path) -> None:
    config = read(tmp_path, rope_theta=500000.0, eos_token_id=7, tie_word_embeddings=True)

    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden=128,
        layers=4,
        q_heads=8,
        kv_heads=2,
        head_dim=16,
        intermediate=256,
        vocab_size=1000,
        tie_embeddings=True,
        rope=Rope(theta=500000.0),
        rms_eps=1e-5,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=0,
        max_context=4096,
        eos_ids=(7,),
        dtype="bfloat16",
    )


@pytest.mark.parametrize("architecture", NAMES)
def test_files_that_transformers_writes(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoConfig

    shape = {key: value for key, value in BASE.items() if key != "torch_dtype"}
    AutoConfig.for_model(architecture, **shape, dtype="bfloat16", head_dim=32, eos_token_id=3).save_pretrained(tmp_path)

    config = ModelConfig.from_folder(tmp_path)

    assert config.architecture == f"{NAMES[architecture]}ForCausalLM"
    assert (config.head_dim, config.q_heads, config.kv_heads, config.max_context) == (32, 8, 2, 4096)
    assert (config.dtype, config.eos_ids, config.rope) == ("bfloat16", (3,), Rope(theta=10000.0))
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (architecture == "qwen2", False, architecture == "qwen3")
    assert config.sliding_window == 0  # Mistral's default, 4096, is the whole context here


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("llama", {}, 16),
        ("llama", {"head_dim": None}, 16),
        ("mistral", {"head_dim": 64}, 64),
        ("qwen3", {}, 128),
    ],
)
def test_head_size(tmp_path: Path, architecture: str, keys: dict[str, Any], expected: int) -> None:
    assert read(tmp_path, architecture, **keys).head_dim == expected


def test_without_kv_heads_every_query_head_has_its_own(tmp_path: Path) -> None:
    assert read(tmp_path, num_key_value_heads=None).kv_heads == 8


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("mistral", {"attention_bias": True}, (False, False, False)),
    ],
)
def test_biases(tmp_path: Path, architecture: str, keys: dict[str, Any], expected: tuple[bool, ...]) -> None:
    config = read(tmp_path, architecture, **keys)

    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == expected


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("llama", {"sliding_window": 100}, 0),
        ("mistral", {"sliding_window": None}, 0),
        ("mistral", {"sliding_window": 100}, 100),
        ("mistral", {"sliding_window": 5000}, 0),
        ("mistral", {"max_position_embeddings": 8192}, 4096),
        ("mistral", {"max_position_embeddings": 8192, "sliding_window": None}, 0),
        ("qwen2", {"max_position_embeddings": 8192}, 0),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": False}, 0),
        ("qwen2", {"sliding_window": 100}, 0),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0}, 100),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 28}, 0),
        ("qwen3", {"sliding_window": 100, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}, 100),
        ("qwen3", {"sliding_window": 100, "use_sliding_window": True, "layer_types": ["full_attention"] * 4}, 0),
    ],
)
def test_sliding_window(tmp_path: Path, architecture: str, keys: dict[str, Any], expected: int) -> None:
    assert read(tmp_path, architecture, **keys).sliding_window == expected


def test_a_window_in_some_layers_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, "qwen2", sliding_window=100, use_sliding_window=True, max_window_layers=1)

    assert "in 3 of 4 layers" in error.message


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, ()),
        (2, None, (2,)),
        ([9, 2], None, (2, 9)),
        (2, 5, (2, 5)),
        (7, [5, 7, 6], (5, 6, 7)),
        (None, 0, (0,)),
    ],
)
def test_ends_of_text_come_from_both_files(
    tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    second = None if generation is None else {"eos_token_id": generation}

    assert read(tmp_path, generation=second, eos_token_id=config).eos_ids == expected


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("keys", "rope", "context"),
    [
        ({}, Rope(theta=10000.0), 4096),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, Rope(theta=5.0), 4096),
        ({"rope_theta": 5.0, "rope_scaling": None}, Rope(theta=5.0), 4096),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}},
            Rope(theta=5.0, kind="linear", factor=2.0),
            4096,
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5.0, **LLAMA3}},
            Rope(theta=5.0, kind="llama3", factor=8.0, original_context=1024),
            4096,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            Rope(theta=10000.0, kind="yarn", factor=4.0, original_context=4096, magnitude=1.1386294361119891),
            16384,
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1024, "attention_factor": 1.0}},
            Rope(theta=10000.0, kind="yarn", factor=4.0, original_context=1024),
            4096,
        ),
    ],
)
def test_rotary_positions_in_new_and_old_files(tmp_path: Path, keys: dict[str, Any], rope: Rope, context: int) -> None:
    config = read(tmp_path, **keys)

    assert (config.rope, config.max_context) == (rope, context)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("'dynamic'", "default, linear, llama3, yarn")),
        ({"rope_parameters": {"rope_type": "longrope"}}, ("'longrope'", "yarn")),
        ({"rope_parameters": {"rope_type": "llama3"}}, ("'factor'", "lacks")),
        ({"partial_rotary_factor": 0.5}, ("a part of each head", "")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("'gptq'", "bfloat16")),
        ({"architectures": ["MixtralForCausalLM"]}, ("MixtralForCausalLM", "LlamaForCausalLM")),
        ({"architectures": None, "model_type": "gemma3"}, ("gemma3", "Qwen3ForCausalLM")),
        ({"hidden_act": "gelu"}, ("'gelu'", "silu")),
        ({"dtype": "float8"}, ("'float8'", "float32")),
        ({"hidden_size": "big"}, ("'hidden_size'", "positive integer")),
        ({"hidden_size": None}, ("'hidden_size'", "lacks")),
        ({"num_hidden_layers": True}, ("'num_hidden_layers'", "positive integer")),
        ({"rms_norm_eps": 0}, ("'rms_norm_eps'", "positive number")),
        ({"rope_theta": "x"}, ("'rope_theta'", "positive number", "'x'")),
        ({"rope_theta": float("inf")}, ("cannot read", "")),
        ({"max_position_embeddings": 10**12}, ("'max_position_embeddings'", "positive integer up to 2147483647")),
        ({"num_hidden_layers": 10**9}, ("'num_hidden_layers'", "positive integer up to 10000")),
        ({"architectures": None, "model_type": []}, ("a model without an architecture is not supported", "")),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "x", "mscale_all_dim": 1}}, ("'mscale'", "'x'")),
        ({"tie_word_embeddings": "yes"}, ("'tie_word_embeddings'", "true or false")),
        ({"eos_token_id": ["x"]}, ("'eos_token_id'", "token id")),
        ({"rope_scaling": "linear"}, ("'rope_scaling'", "object")),
        ({"num_key_value_heads": 3}, ("8 query heads", "3 KV heads")),
        ({"head_dim": 15}, ("'head_dim'", "even")),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, keys: dict[str, Any], words: tuple[str, str]) -> None:
    error = refusal(tmp_path, **keys)

    assert "config.json" in error.message
    assert all(word in str(error) for word in words)


def test_a_model_type_names_the_architecture_where_nothing_else_does(tmp_path: Path) -> None:
    assert read(tmp_path, "qwen3", architectures=None).qk_norm


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json"),
        ("{", "cannot read"),
        ("[1]", "not a JSON object"),
        (5000 * "[" + 5000 * "]", "cannot read .*config.json: nested too deep"),
    ],
)
def test_a_folder_without_a_readable_config(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ModelError, match=words):
        ModelConfig.from_folder(tmp_path)
