"""What a person can set about a server, in one frozen struct.

:mod:`tpserve.settings` fills it: command line over environment over file over these defaults.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["AUTO", "ServeConfig"]

AUTO = "auto"


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one server or of one offline engine.

    Attributes:
        model: a folder, a .gguf file or a hub id; empty: the embedded default model.
        served_model_name: the name that clients use; empty: derived from ``model``.
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        tp: tensor-parallel ranks.
        transport: carries the fan-out, and the pipes where it can.
        pipe_transport: carries the pipes where ``transport`` cannot.
        sync: announces the rounds.
        policy: decides what runs next.
        attn: attention backend.
        ops: fused layer steps and sampling.
        comm: tensor communication between ranks.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32``, ``bfloat16``, ``float16``; ``auto``: bfloat16 on CUDA, else the model's own, never float16.
        page_size: tokens a KV page, 1 … 256.
        kv_tokens: tokens in the KV pool; 0: from ``memory_fraction``.
        memory_fraction: share of the device's memory for weights and KV pool together.
        max_context: longest sequence; 0: the model's own limit.
        max_running: most requests in a batch.
        max_step_tokens: most tokens that one step computes.
        max_requests: most requests in flight; past it the server answers 503 with Retry-After.
        tokenizers: tokenizer processes.
        detokenizers: detokenizer processes.
        threads: compute threads a rank on the CPU; 0 shares the cores out.
        cpu_affinity: ``auto`` (a share of the cores for each rank when tp > 1), ``none``, or core lists: ``0-3;4-7``.
        base_device: index of rank 0's accelerator.
        device_step: distance between the accelerators of neighbouring ranks.
        max_messages_per_round: most messages that one round takes.
        max_round_bytes: a round stops taking messages at this many bytes.
        heartbeat: seconds between signs of life of an idle leader.
        watchdog: seconds of silence after which a rank gives up.
        startup_timeout: seconds until the server must be ready.
        drain_timeout: seconds that a stopping server gives running requests.
        log_level: debug, info, warning or error.
        options: plugin options: ``{"transport": {"send_buffer": 8192}}``, keyed by kind, or by ``kind.name``.
    """

    model: str = ""
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    tp: int = 1
    transport: str = AUTO
    pipe_transport: str = AUTO
    sync: str = AUTO
    policy: str = "fcfs"
    attn: str = AUTO
    ops: str = AUTO
    comm: str = AUTO
    device: str = AUTO
    dtype: str = AUTO
    page_size: int = 16
    kv_tokens: int = 0
    memory_fraction: float = 0.9
    max_context: int = 0
    max_running: int = 256
    max_step_tokens: int = 8192
    max_requests: int = 4096
    tokenizers: int = 1
    detokenizers: int = 1
    threads: int = 0
    cpu_affinity: str = AUTO
    base_device: int = 0
    device_step: int = 1
    max_messages_per_round: int = 256
    max_round_bytes: int = 64 << 20
    heartbeat: float = 5.0
    watchdog: float = 30.0
    startup_timeout: float = 600.0
    drain_timeout: float = 5.0
    log_level: str = "info"
    options: dict[str, dict[str, Any]] = {}
