"""Engines on CUDA and on the CPU, and the kernels that they can have."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tpserve.api import NoOptions, Ops
from tpserve.config import ServeConfig
from tpserve.distributed.partition import Partition
from tpserve.engine.build import build_engine
from tpserve.models.config import ModelConfig
from tpserve.ops.reference import TorchOps
from tpserve.step import Engine

__all__ = ["TORCH", "TRITON", "TRITON_ATTENTION", "engine_on"]

TORCH = "tpserve.attention.reference:TorchAttention"
TRITON_ATTENTION = "tpserve_attn_triton.attention:TritonAttention"
TRITON = pytest.param(
    TRITON_ATTENTION, marks=pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_context": 512,
    "max_running_requests": 8,
    "max_step_tokens": 512,
    "kv_tokens": 2048,
    "cuda_graph": False,
}


def engine_on(device: str, attention: str, folder: Path, ops: Ops | None = None, **settings: Any) -> Engine:
    """An engine; ``settings`` change SETTINGS."""
    model = ModelConfig.from_folder(folder)
    module, _, name = attention.partition(":")
    make = getattr(import_module(module), name)
    return build_engine(
        ServeConfig(**{**SETTINGS, **settings}),
        model,
        folder,
        Partition.of(model, 1, 0),
        device,
        lambda shape: make(NoOptions(), shape),
        ops or TorchOps(NoOptions()),
        None,
    )
