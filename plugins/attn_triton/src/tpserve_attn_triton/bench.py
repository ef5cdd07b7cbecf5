"""How fast the kernels are here, as JSON: ``python -m tpserve_attn_triton.bench [package.module:Class]``.

Without a class, Triton's; with one, another backend's on the same batches.

Decode is held against the rate of a large copy, bytes read and written: it reads each cell once. Layers take turns over
several caches, so that none is found in L2, and a CUDA graph holds them, so that launching costs nothing. Times are
medians.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from tpserve.api import Attention, AttentionBatch, AttentionShape, NoOptions

__all__ = ["main"]

TRITON = "tpserve_attn_triton.attention:TritonAttention"

Make = Callable[[AttentionShape], Attention]

POOL = 2 << 30
"""Bytes of the caches that take turns, about."""

DECODE = {
    "64 x 1024": [1024] * 64,
    "256 x 300-1000": random.Random(1).choices(range(300, 1001), k=256),
    "1 x 640": [640],
    "1 x 8192": [8192],
    "32 x 600 and 1 x 32768": [600] * 16 + [32768] + [600] * 16,
}
"""Cached tokens of each sequence."""

PREFILL = {
    "16 x 1024": [(1024, 0)] * 16,
    "4 x 4096": [(4096, 0)] * 4,
    "29 x 100-1024": [(random.Random(seed).randint(100, 1024), 0) for seed in range(29)],
    "8 x 512 after 4096": [(512, 4096)] * 8,
}
"""New and cached tokens of each sequence."""


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(
        prog="python -m tpserve_attn_triton.bench", description="How fast attention kernels are here, as JSON."
    )
    parser.add_argument(
        "backend", nargs="?", default=TRITON, metavar="package.module:Class", help="Triton's if left out"
    )
    options = parser.parse_args()
    make: Make = partial(load_class(parser, options.backend), NoOptions())
    copy = copy_rate()
    print(json.dumps({"device": torch.cuda.get_device_name(), "copy GB/s": round(copy)}), flush=True)
    for name, lengths in DECODE.items():
        for heads in ((16, 8), (32, 8)):
            shape = make_shape(*heads, len(lengths), max(lengths))
            print(json.dumps(time_decode(make, name, shape, lengths, copy)), flush=True)
    for name, sequences in PREFILL.items():
        for heads in ((16, 8), (32, 8)):
            shape = make_shape(*heads, len(sequences), max(map(sum, sequences)))
            print(json.dumps(time_prefill(make, name, shape, sequences)), flush=True)
    print(json.dumps({"torch dense": "16 x 1024", "heads": "16/8", "TFLOP/s": round(dense_rate(16, 1024, 16, 8))}))


def load_class(parser: argparse.ArgumentParser, path: str) -> Callable[..., Any]:
    """Import a class to measure; end the program if it is not there, or no GPU is."""
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    module, _, name = path.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        parser.error(f"{path} is not there: {error}")
    return found


def make_shape(q_heads: int, kv_heads: int, sequences: int, longest: int, page_size: int = 16) -> AttentionShape:
    """bfloat16 heads of 128."""
    return AttentionShape(
        layers=1,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=128,
        page_size=page_size,
        max_context=longest,
        max_running=sequences,
        scale=128**-0.5,
        dtype="bfloat16",
        device="cuda",
    )


def time_decode(make: Make, name: str, shape: AttentionShape, lengths: list[int], copy: float) -> dict[str, Any]:
    """One new token for each sequence."""
    moved = sum(lengths) * shape.kv_heads * shape.head_dim * 4
    batch, layers = make_batch(shape, [(1, length - 1) for length in lengths], copies=min(max(3, POOL // moved), 64))
    attention = make(shape)
    attention.replay(batch)
    attention.capture(batch)
    query = torch.randn(len(lengths), shape.q_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    seconds = time_graph([partial(attention.run, query, *layer) for layer in layers])
    rate = moved / seconds / 1e9
    return {
        "decode": name,
        "heads": f"{shape.q_heads}/{shape.kv_heads}",
        "us": round(1e6 * seconds, 1),
        "GB/s": round(rate),
        "of copy": round(rate / copy, 3),
    }


def time_prefill(make: Make, name: str, shape: AttentionShape, sequences: list[tuple[int, int]]) -> dict[str, Any]:
    """Prompts, or what is left of them."""
    batch, layers = make_batch(shape, sequences, copies=2)
    attention = make(shape)
    attention.plan(batch)
    query = torch.randn(sum(batch.query_lens), shape.q_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    seconds = time_graph([partial(attention.run, query, *layer) for layer in layers] * 4)
    pairs = sum(new * cached + new * (new + 1) // 2 for new, cached in sequences)
    return {
        "prefill": name,
        "heads": f"{shape.q_heads}/{shape.kv_heads}",
        "us": round(1e6 * seconds, 1),
        "TFLOP/s": round(4 * pairs * shape.q_heads * shape.head_dim / seconds / 1e12),
    }


def dense_rate(sequences: int, length: int, q_heads: int, kv_heads: int) -> float:
    """TFLOP/s of torch's attention over caches that lie in one piece, sequence by sequence."""
    q = torch.randn(sequences, q_heads, length, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, sequences, kv_heads, length, 128, dtype=torch.bfloat16, device="cuda").unbind(0)
    run = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    seconds = time_graph([run] * 8)
    return 2 * length * (length + 1) * sequences * q_heads * 128 / seconds / 1e12


def make_batch(
    shape: AttentionShape, sequences: list[tuple[int, int]], copies: int
) -> tuple[AttentionBatch, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A batch of (new, cached) tokens over shuffled pages, and keys and values of several layers."""
    new, kv = [new for new, _ in sequences], [new + cached for new, cached in sequences]
    needed = [-(-length // shape.page_size) for length in kv]
    pages = torch.randperm(sum(needed), device="cuda", dtype=torch.int32)
    table = torch.zeros(len(kv), max(needed), dtype=torch.int32, device="cuda")
    for row, first, count in zip(table, accumulate(needed, initial=0), needed, strict=False):
        row[:count] = pages[first : first + count]
    size = (len(pages), shape.page_size, shape.kv_heads, shape.head_dim)
    layers = []
    for _ in range(copies):
        keys, values = torch.randn(2, *size, dtype=torch.bfloat16, device="cuda").unbind(0)
        layers.append((keys, values))
    batch = AttentionBatch(
        query_lens=new,
        kv_lens=kv,
        page_table=table,
        slots=list(range(len(kv))),
        slots_tensor=torch.arange(len(kv), device="cuda"),
        kv_lens_tensor=torch.tensor(kv, dtype=torch.int32, device="cuda"),
        query_starts=torch.tensor([0, *accumulate(new)], dtype=torch.int32, device="cuda"),
    )
    return batch, layers


def copy_rate() -> float:
    """GB/s of copying 1 GiB on the device."""
    source = torch.randint(255, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / time_calls(lambda: [target.copy_(source) for _ in range(8)]) * 8 / 1e9


def time_graph(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of a call: all of them in one graph, the median of several replays."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return time_calls(graph.replay) / len(calls)


def time_calls(call: Callable[[], object]) -> float:
    """Seconds on the device, the median of several."""
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return median(times)


if __name__ == "__main__":
    main()
