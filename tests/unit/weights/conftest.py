"""A small GGUF file, made from a small model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeGguf = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    """Write a model folder of architecture qwen2 as a GGUF file, its matrices of the type named.

    ``extra`` adds or replaces metadata. ``renamed`` gives tensors other names; None leaves one out.
    """

    def make(
        folder: Path,
        matrices: str = "F32",
        extra: dict[str, Any] | None = None,
        renamed: dict[str, str | None] | None = None,
    ) -> Path:
        return write_gguf(folder, tmp_path / "tiny.gguf", matrices, extra or {}, renamed or {})

    return make


PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, path: Path, matrices: str, extra: dict[str, Any], renamed: dict[str, str | None]) -> Path:
    import gguf
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    from tpserve.models.config import ModelConfig
    from tpserve.testing.models import CHAT_TEMPLATE, SPECIAL_TOKENS

    config = ModelConfig.from_folder(folder)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.q_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope.theta)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[token in SPECIAL_TOKENS] for token in tokens])
    writer.add_token_merges(["e a", "t e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in extra.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
            continue
        for written in writer.kv_data:
            written.pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    for name, tensor in load_file(folder / "model.safetensors").items():
        fits = tensor.ndim > 1 and tensor.shape[1] % 32 == 0  # quantised types come in blocks of 32
        kind = gguf.GGMLQuantizationType[matrices if fits else "F32"]
        written_name = renamed.get(gguf_name(name), gguf_name(name))
        if written_name is not None:
            writer.add_tensor(written_name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """The GGUF name of a stored tensor."""
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside:
        return outside[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{kind}"
