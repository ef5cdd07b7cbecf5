"""What a person can set about a server, in one frozen struct.

:mod:`tpserve.settings` fills it: command line over environment over file over these defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = ["AUTO", "LONGEST", "ServeConfig"]

AUTO = "auto"

Natural = Annotated[int, Meta(ge=0, le=1 << 40)]
Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
Few = Annotated[int, Meta(ge=1, le=1024)]
"""Of processes."""

LONGEST = 1_000_000
"""Seconds, eleven days: libraries count waits in milliseconds of 32 bits."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one server or of one offline engine.

    Attributes:
        model: a folder, a .gguf file or a hub id; empty: the embedded default model.
        load_format: what the weights must be: ``auto``, ``safetensors``, ``gguf``; ``dummy`` draws them at random, and
            of the model only config.json is needed.
        served_model_name: the name that clients use; empty: derived from ``model``.
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        tp: tensor-parallel ranks.
        transport: carries the fan-out, and the pipes where it can.
        pipe_transport: carries the pipes where ``transport`` cannot.
        sync: announces the rounds.
        policy: decides what runs next.
        attn: attention backend; ``PREFILL,DECODE`` takes two.
        ops: fused layer steps and sampling.
        comm: tensor communication between ranks.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32``, ``bfloat16``, ``float16``; ``auto``: bfloat16 on CUDA, else the model's own, never float16.
        page_size: tokens a KV page, 1 … 256.
        kv_tokens: tokens in the KV pool; 0: from ``memory_fraction``.
        memory_fraction: share of the device's memory for all that a server keeps there.
        max_context: longest sequence; 0: the model's own limit.
        max_running_requests: most requests in a batch.
        max_step_tokens: most tokens that one step computes; 0: on the CPU what takes about a second, on CUDA 16384.
        chunked_prefill_size: most tokens of one prompt that one step computes; 0: as many as a step may.
        cache: ``radix`` keeps computed pages for prompts that begin alike; ``none`` does not.
        overlap: decide the next round while a step is computed; None: on accelerators, which compute by themselves.
        cuda_graph: replay decode steps from CUDA graphs, where all parts can be recorded.
        max_requests: most requests in flight; past it the server answers 503 with Retry-After.
        max_queued_requests: most beyond ``max_running_requests``; past it, 429 with Retry-After. 0: no limit.
        tokenizers: tokenizer processes.
        detokenizers: detokenizer processes.
        threads: compute threads a rank on the CPU; 0 shares the cores out.
        cpu_affinity: ``auto`` (a share of the cores for each rank when tp > 1), ``none``, or core lists: ``0-3;4-7``.
        base_device: index of rank 0's accelerator.
        device_step: distance between the accelerators of neighbouring ranks; 0 puts all on one.
        max_messages_per_round: most messages that one round takes.
        max_round_bytes: a round stops taking messages at this many bytes.
        heartbeat: seconds between signs of life of an idle leader; less than ``watchdog``.
        watchdog: seconds of silence after which a process counts as dead; longer than any step.
        startup_timeout: seconds until the server must be ready.
        drain_timeout: seconds that a stopping server gives running requests.
        max_restarts: how often processes that died are started again before the server gives up.
        profile: a folder to which each rank writes a trace of some steady steps; empty: none.
        record: a file to which rank 0 writes all that it decides and from what; empty: none.
        log_level: debug, info, warning or error.
        options: plugin options: ``{"transport": {"send_buffer": 8192}}``, keyed by kind, or by ``kind.name``.
    """

    model: str = ""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    tp: Few = 1
    transport: str = AUTO
    pipe_transport: str = AUTO
    sync: str = AUTO
    policy: str = "fcfs"
    attn: str = AUTO
    ops: str = AUTO
    comm: str = AUTO
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    page_size: Annotated[int, Meta(ge=1, le=256)] = 16
    kv_tokens: Natural = 0
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    max_context: Natural = 0
    max_running_requests: Annotated[int, Meta(ge=1, le=1 << 16)] = 256
    max_step_tokens: Natural = 0
    chunked_prefill_size: Natural = 0
    cache: Literal["radix", "none"] = "radix"
    overlap: bool | None = None
    cuda_graph: bool = True
    max_requests: Positive = 4096
    max_queued_requests: Natural = 0
    tokenizers: Few = 1
    detokenizers: Few = 1
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    cpu_affinity: str = AUTO
    base_device: Natural = 0
    device_step: Natural = 1
    max_messages_per_round: Positive = 256
    max_round_bytes: Positive = 64 << 20
    heartbeat: Annotated[float, Meta(ge=0.01, le=LONGEST)] = 5.0
    watchdog: Annotated[float, Meta(ge=1, le=LONGEST)] = 30.0
    startup_timeout: Annotated[float, Meta(gt=0, le=LONGEST)] = 600.0
    drain_timeout: Annotated[float, Meta(ge=0, le=LONGEST)] = 5.0
    max_restarts: Natural = 3
    profile: str = ""
    record: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    options: dict[str, dict[str, Any]] = {}
