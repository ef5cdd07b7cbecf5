"""A model's shape and two machines."""

from __future__ import annotations

from tpserve.launch.devices import Accelerators
from tpserve.models.config import ModelConfig, Rope

NONE = Accelerators(reason="no NVIDIA driver")
TWO = Accelerators(count=2, sm=90)
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden=576,
    layers=2,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab_size=1000,
    tie_embeddings=True,
    rope=Rope(10000.0),
    rms_eps=1e-5,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_window=0,
    max_context=1024,
    eos_ids=(0,),
    dtype="float32",
)
