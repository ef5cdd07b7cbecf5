"""Builds a rank's engine: weights, pool size, decoder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from tpserve.api import Attention, AttentionShape, Comm, Ops
from tpserve.config import ServeConfig
from tpserve.distributed.partition import Partition
from tpserve.engine.engine import ModelEngine
from tpserve.engine.graphs import GraphRecorder, ladder
from tpserve.engine.memory import allocate_caches, check_room, page_count
from tpserve.engine.rehearsal import rehearsal, rehearsal_pages, rehearse
from tpserve.models.config import ModelConfig
from tpserve.models.decoder import Decoder
from tpserve.step import Engine, EngineLimits
from tpserve.weights.dummy import draw_shard
from tpserve.weights.loader import load_shard, shard_bytes

__all__ = ["attention_shape", "build_engine"]

logger = logging.getLogger(__name__)


def build_engine(
    config: ServeConfig,
    model: ModelConfig,
    folder: Path,
    partition: Partition,
    device: str,
    attention: Callable[[AttentionShape], Attention],
    ops: Ops,
    join: Callable[[], Comm] | None,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Load this rank's share of a model and make the engine that computes with it.

    Args:
        config: the server's settings; ``dtype``, ``max_step_tokens`` and ``cuda_graph`` say what was decided.
        model: the model's shape.
        folder: where its weights are.
        partition: this rank's share.
        device: a torch device.
        attention: makes the attention backend.
        ops: computes the steps of a layer.
        join: joins the tensor group, which the engine then closes; None for one rank. Called when the weights are
            loaded: ranks need not load equally fast.
        progress: called with (done, all) while weights load.

    Raises:
        ModelError: the weights are not those of the model.
        LaunchError: there is no room for weights, tables or a KV pool.
        TransportError: another rank failed meanwhile.
    """
    if config.threads and device == "cpu":
        torch.set_num_threads(config.threads)
    shape = attention_shape(config, model, partition, device)
    check_room(shape, shard_bytes(model, partition, getattr(torch, shape.dtype)))
    if config.load_format == "dummy":
        weights = draw_shard(model, partition, getattr(torch, shape.dtype), device)
    else:
        weights = load_shard(folder, model, partition, getattr(torch, shape.dtype), device, progress)
    backend = attention(shape)
    comm = join() if join else None
    with torch.inference_mode():
        decoder = Decoder(model, partition, weights, ops, backend, comm, shape.max_context)

    def count_pages(reserve: int) -> int:
        pages = page_count(config, shape, partition.size, reserve)
        return pages if comm is None else comm.min(pages)

    def make(limits: EngineLimits) -> ModelEngine:
        # A page more, for what pads a batch.
        return ModelEngine(limits, decoder, backend, ops, allocate_caches(shape, limits.pages + 1), comm, device)

    limits = EngineLimits(
        pages=count_pages(0),
        page_size=shape.page_size,
        slots=shape.max_running,
        max_context=shape.max_context,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
    )
    if not device.startswith("cuda"):
        return make(limits)
    sizes = ladder(shape.max_running) if config.cuda_graph else []
    reserve = _rehearse(make, limits, config.max_step_tokens, sizes, device)
    engine = make(replace(limits, pages=count_pages(reserve)))
    if sizes:
        begun = time.monotonic()
        engine.record(sizes, GraphRecorder(device))
        logger.info("recorded CUDA graphs of %d batch sizes in %.1f s", len(sizes), time.monotonic() - begun)
    return engine


def _rehearse(
    make: Callable[[EngineLimits], ModelEngine], limits: EngineLimits, tokens: int, sizes: list[int], device: str
) -> int:
    """Rehearse steps of ``tokens`` tokens, or as many as the pool can hold; the bytes that they and graphs need."""
    begun = time.monotonic()
    while rehearsal_pages(limits, tokens) > limits.pages and tokens > 1:
        tokens //= 2
    small = replace(limits, pages=rehearsal_pages(limits, tokens))
    needed = rehearse(lambda: make(small), rehearsal(small, tokens), sizes, device)
    logger.info("steps and graphs need %.0f MiB; tried in %.1f s", needed / (1 << 20), time.monotonic() - begun)
    return needed


def attention_shape(config: ServeConfig, model: ModelConfig, partition: Partition, device: str) -> AttentionShape:
    """What one rank's attention computes; a ``max_context`` above the model's own limit is lowered to it."""
    return AttentionShape(
        layers=model.layers,
        q_heads=partition.q_heads.size,
        kv_heads=partition.kv_heads.size,
        head_dim=model.head_dim,
        page_size=config.page_size,
        max_context=min(config.max_context or model.max_context, model.max_context),
        max_running=config.max_running_requests,
        scale=model.head_dim**-0.5,
        dtype=config.dtype,
        device=device,
        sliding_window=model.sliding_window,
    )
