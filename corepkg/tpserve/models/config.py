"""The shape of a model, read from its folder's ``config.json`` and ``generation_config.json``.

Both the files that transformers 5 writes and older ones are understood. Whatever would change the result and is not
implemented is refused, so a model that loads computes what its authors meant.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, get_args

import msgspec

from tpserve.errors import ModelError
from tpserve.models.fields import MOST, Fields

__all__ = ["ARCHITECTURES", "Architecture", "DType", "ModelConfig", "Rope"]

Architecture = Literal["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
DType = Literal["float32", "bfloat16", "float16"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]

ARCHITECTURES: tuple[str, ...] = get_args(Architecture)
"""The supported architectures, as ``config.json`` spells them."""

MOST_LAYERS = 10_000
"""Each is a list of tensors to look for."""

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class Rope(msgspec.Struct, frozen=True):
    """How positions turn into angles; :func:`tpserve.models.rope.rotary_table` computes them.

    Attributes:
        theta: base of the wavelengths.
        kind: how the wavelengths are stretched for longer contexts.
        factor: the stretch; of linear, llama3 and yarn.
        original_context: tokens of context before stretching; of llama3 and yarn.
        low_freq_factor: llama3: wavelengths above original_context / this are stretched fully.
        high_freq_factor: llama3: wavelengths below original_context / this are left alone.
        beta_fast: yarn: dimensions that turn more often than this within the original context are left alone.
        beta_slow: yarn: dimensions that turn less often than this are stretched fully.
        truncate: yarn: round the two bounds outwards to whole dimensions.
        magnitude: factor on cosines and sines.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only model of the Llama family.

    Attributes:
        architecture: as ``config.json`` spells it; for messages, the fields below say all that matters.
        hidden: width of the residual stream.
        layers: decoder layers.
        q_heads: query heads.
        kv_heads: key/value heads; divides ``q_heads``.
        head_dim: size of a head; even.
        intermediate: width of the MLP.
        vocab_size: rows of the embedding; token ids are below this.
        tie_embeddings: the output head is the embedding.
        rope: rotary positions.
        rms_eps: epsilon of every norm.
        qkv_bias: the q, k and v projections have a bias.
        o_bias: the output projection of attention has a bias.
        mlp_bias: the three projections of the MLP have a bias.
        qk_norm: q and k are normalised per head before rotation.
        sliding_window: how many tokens back a token sees, itself included, in every layer; 0: all.
        max_context: the longest sequence in tokens.
        eos_ids: tokens that end a text, sorted; may be empty.
        dtype: of the stored weights.
    """

    architecture: Architecture
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    tie_embeddings: bool
    rope: Rope
    rms_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int
    max_context: int
    eos_ids: tuple[int, ...]
    dtype: DType

    @staticmethod
    def from_folder(folder: Path) -> ModelConfig:
        """Read a model folder.

        Raises:
            ModelError: a file is missing or not JSON, a key is missing or wrong, or the model needs what is not
                implemented; the message names it and what is supported.
        """
        generation = folder / "generation_config.json"
        fields = Fields.of(folder / "config.json")
        return _from_fields(fields, Fields.of(generation) if generation.exists() else Fields(generation, {}))


def _from_fields(fields: Fields, generation: Fields) -> ModelConfig:
    architecture = _architecture(fields)
    _refuse_what_changes_results(fields)
    q_heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise ModelError(f"{fields.path}: {q_heads} query heads are not a multiple of {kv_heads} KV heads")
    hidden = fields.count("hidden_size")
    layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    rope, max_context = _positions(fields)
    attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        hidden=hidden,
        layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(fields, architecture, hidden, q_heads),
        intermediate=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        rope=rope,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(fields, architecture, layers, max_context),
        max_context=max_context,
        eos_ids=tuple(sorted({*fields.ids("eos_token_id"), *generation.ids("eos_token_id")})),
        dtype=_dtype(fields),
    )


def _architecture(fields: Fields) -> Architecture:
    named = fields.get("architectures") or [_MODEL_TYPES.get(str(fields.get("model_type")))]
    found = named[0] if isinstance(named, list) else named
    if found not in ARCHITECTURES:
        what = found or fields.get("model_type") or "a model without an architecture"
        raise ModelError(f"{fields.path}: {what} is not supported", f"Supported: {', '.join(ARCHITECTURES)}")
    return found  # type: ignore[no-any-return]


def _refuse_what_changes_results(fields: Fields) -> None:
    quantised = fields.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise ModelError(
            f"{fields.path}: weights quantised with {method!r} are not supported",
            "Supported: float32, bfloat16 and float16 safetensors, and GGUF files, which are converted",
        )
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", "silu")


def _head_dim(fields: Fields, architecture: Architecture, hidden: int, q_heads: int) -> int:
    default = 128 if architecture == "Qwen3ForCausalLM" else hidden // q_heads
    head_dim = fields.count("head_dim", default)
    if head_dim % 2:
        raise fields.unsupported("head_dim", "even sizes, which rotary positions need")
    return head_dim


def _positions(fields: Fields) -> tuple[Rope, int]:
    """The rotary parameters and the longest sequence."""
    trained = fields.count("max_position_embeddings")
    scaling = fields.section("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    if scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{fields.path}: rotary positions on a part of each head are not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    # Older files keep the length before stretching beside the parameters, as transformers reads it: the outer one wins.
    original = fields.count(
        "original_max_position_embeddings", scaling.count("original_max_position_embeddings", trained)
    )
    if kind == "default":
        return Rope(theta=theta), trained
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=scaling.number("factor")), trained
    if kind == "llama3":
        rope = Rope(
            theta=theta,
            kind="llama3",
            factor=scaling.number("factor"),
            original_context=original,
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
        )
        return rope, trained
    if kind == "yarn":
        rope = _yarn(scaling, theta, original, trained)
        # Qwen's files ask for yarn without raising max_position_embeddings.
        return rope, max(trained, int(min(original * rope.factor, MOST)))
    raise ModelError(
        f"{fields.path}: rotary positions of type {kind!r} are not supported",
        f"Supported: {', '.join(get_args(RopeKind))}",
    )


def _yarn(scaling: Fields, theta: float, original: int, trained: int) -> Rope:
    factor = scaling.number("factor", trained / original)
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", default=True),
        magnitude=scaling.number("attention_factor", _yarn_magnitude(scaling, factor)),
    )


def _yarn_magnitude(scaling: Fields, factor: float) -> float:
    """The temperature of Peng et al. (2023), equation 22, and DeepSeek's ratio of two of them."""

    def magnitude(scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0

    above, below = (scaling.number(key) if scaling.get(key) else 0.0 for key in ("mscale", "mscale_all_dim"))
    return magnitude(above) / magnitude(below) if above and below else magnitude(1.0)


def _sliding_window(fields: Fields, architecture: Architecture, layers: int, max_context: int) -> int:
    """The window of every layer; 0 where no layer has one or none is shorter than the context."""
    absent = "sliding_window" not in fields.values  # transformers then takes 4096; null is no window
    if architecture == "LlamaForCausalLM" or not (absent or fields.get("sliding_window")):
        return 0
    window = fields.count("sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        windowed = layers
    elif not fields.flag("use_sliding_window"):
        windowed = 0
    elif (types := fields.get("layer_types")) is not None:
        if not isinstance(types, list):
            raise fields.wrong("layer_types", "a list")
        windowed = sum(kind == "sliding_attention" for kind in types)
    else:
        full = fields.get("max_window_layers", 28)
        if not isinstance(full, int):
            raise fields.wrong("max_window_layers", "an integer")
        windowed = max(0, layers - full)
    if windowed == 0 or window >= max_context:
        return 0
    if windowed < layers:
        raise ModelError(
            f"{fields.path}: a sliding window in {windowed} of {layers} layers is not supported",
            "Supported: a window in every layer or in none",
        )
    return window


def _dtype(fields: Fields) -> DType:
    found = fields.get("dtype", fields.get("torch_dtype", "float32"))
    if found not in get_args(DType):
        raise ModelError(f"{fields.path}: dtype {found!r} is not supported", f"Supported: {', '.join(get_args(DType))}")
    return found  # type: ignore[no-any-return]
