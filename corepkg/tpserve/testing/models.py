"""Small random models in Hugging Face folders, with a tokenizer and a chat template, ready to be served.

They have the shapes of real ones (grouped heads, biases, q/k norms, windows) and weights scaled so that greedy decoding
wanders instead of repeating itself, which makes a wrong token visible. The same arguments give the same bytes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["ARCHITECTURES", "CHAT_TEMPLATE", "SPECIAL_TOKENS", "VOCAB_SIZE", "make_model", "make_tokenizer"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens 0, 1 and 2; the last ends a text."""

VOCAB_SIZE = 320
"""Tokens of the tokenizer: the special ones, 256 bytes, and pairs of letters."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 48},
    "qwen2": {"hidden_size": 128, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {},
}
"""What each architecture changes in the common shape. Llama is uneven as SmolLM2 is, and Mistral has a window."""


def make_model(
    folder: Path, architecture: str = "qwen3", *, seed: int = 0, dtype: str = "float32", **changes: Any
) -> Path:
    """Write a small random model.

    Args:
        folder: where to; made if needed.
        architecture: a key of :data:`ARCHITECTURES`.
        seed: of the weights.
        dtype: of the stored weights.
        **changes: fields of the transformers configuration, such as ``rope_parameters``.

    Returns:
        ``folder``, with config.json, generation_config.json, model.safetensors, tokenizer.json and
        tokenizer_config.json.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **{**_COMMON, **ARCHITECTURES[architecture], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    _randomise(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer of :data:`VOCAB_SIZE` tokens that can encode any text, with a chat template."""
    import msgspec
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in "etaoinsrhldcu" for second in "aeiou"]
    merges = pairs[: VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet)]
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(settings)))
    return folder


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter anew: products keep the size of their input, scores and logits are made to vary."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                mean, scale = (0.0, 0.25) if name.endswith("bias") else (1.0, 0.1)
            else:
                mean, scale = 0.0, _gain(name) / math.sqrt(parameter.shape[1])
            parameter.copy_(mean + scale * noise)


def _gain(name: str) -> float:
    """Layers outweigh the embedding in the residual, or a tied head would repeat the last token for ever."""
    gains = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 4.0, "down_proj": 8.0, "embed_tokens": 4.0, "lm_head": 4.0}
    return next((gain for part, gain in gains.items() if part in name), 1.0)
