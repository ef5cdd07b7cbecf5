"""How fast the ops are here, as JSON: ``python -m tpserve_attn_triton.bench_ops [package.module:Class ...]``.

Without classes, Triton's and torch's. The floor is the bytes that must be read and written once at the rate of a large
copy. Inputs take turns, so that none is found in L2, and a CUDA graph holds the calls, so that launching costs nothing.
Times are medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tpserve.api import Linear, NoOptions, Ops, SamplingBatch
from tpserve_attn_triton.bench import copy_rate, load_class, time_graph

__all__ = ["main"]

CLASSES = ["tpserve_attn_triton.ops:TritonOps", "tpserve.ops.reference:TorchOps"]

POOL = 1 << 29
"""Bytes of the inputs that take turns, at least."""

WEIGHTS = {
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "0.6B head": (151_936, 1024),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28_672, 4096),
    "8B down": (4096, 14_336),
    "8B head": (128_256, 4096),
}
"""``[out, in]`` of the shapes of Qwen3-0.6B and Llama-3.1-8B; those of ``gate_up`` are activated too."""

LAYERS = {"28 layers of 0.6B": (28, 1024, 16, 8, 3072), "8 layers of 8B": (8, 4096, 32, 8, 14_336)}
"""Layers, hidden size, query and KV heads of 128, and MLP."""

FILTERS = {
    "greedy": (0.0, 0, 1.0),
    "temperature 0.6": (0.6, 0, 1.0),
    "top_p 0.95": (0.6, 0, 0.95),
    "top_k 20, top_p 0.95": (0.6, 20, 0.95),
}
"""Temperature, top_k and top_p."""

SPREADS = {"flat": (0.64, 0.0), "peaked": (2.5, 20.0)}
"""Standard deviation of the logits, about that of random weights, and how far some of them stand out, the most."""


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(
        prog="python -m tpserve_attn_triton.bench_ops", description="How fast ops are here, as JSON."
    )
    parser.add_argument("ops", nargs="*", metavar="package.module:Class", help="Triton's and torch's if left out")
    paths = parser.parse_args().ops or CLASSES
    ops: dict[str, Ops] = {path.partition(":")[2]: load_class(parser, path)(NoOptions()) for path in paths}
    copy = copy_rate()
    print(json.dumps({"device": torch.cuda.get_device_name(), "copy GB/s": round(copy)}), flush=True)
    for measure in (measure_steps, measure_products, measure_layers, measure_draws):
        for step, n, moved, calls in measure(ops):
            line: dict[str, object] = {"step": step, "rows": n, "floor us": round(moved / copy / 1e3, 2)}
            line |= {f"{name} us": round(1e6 * time_graph(some), 2) for name, some in calls.items()}
            print(json.dumps(line), flush=True)


Case = tuple[str, int, int, dict[str, list[Callable[[], object]]]]
"""A step's name, rows, bytes moved, and calls by what computes it."""


def measure_steps(ops: dict[str, Ops]) -> Iterator[Case]:
    """The small steps of a layer, of the shape of Qwen3-0.6B."""
    weight, norm = random(1024), random(128)
    for n in (1, 256, 8192):
        copies = min(max(3, POOL // (n * 8192)), 256)
        rows = [random(n, 1024) for _ in range(2 * copies)]
        yield (
            "add_rms_norm",
            n,
            8 * n * 1024,
            {
                by: [partial(each.add_rms_norm, rows[2 * i], rows[2 * i + 1], weight, 1e-6) for i in range(copies)]
                for by, each in ops.items()
            },
        )
        products = [random(n, 6144) for _ in range(copies)]
        yield (
            "silu_and_mul",
            n,
            6 * n * 3072,
            {by: [partial(each.silu_and_mul, x) for x in products] for by, each in ops.items()},
        )
        keys, values = (random(1 + n // 16, 16, 8, 128) for _ in range(2))
        slots = torch.randperm(n, device="cuda")
        angles = torch.rand(n, 128, device="cuda")
        heads = [random(n, 32, 128) for _ in range(copies)]
        yield (
            "rotate_and_store, normed",
            n,
            n * 128 * (4 * 32 + 4) + 8 * n,
            {
                by: [partial(each.rotate_and_store, x, angles, keys, values, slots, norm, norm) for x in heads]
                for by, each in ops.items()
            },
        )


def measure_products(ops: dict[str, Ops]) -> Iterator[Case]:
    """Products of few rows."""
    for name, (out, columns) in WEIGHTS.items():
        size = 2 * out * columns
        weights = [random(out, columns) for _ in range(max(2, POOL // size))]
        for n in (1, 2, 8, 16, 32, 64):
            x = random(n, columns)
            prepare = {by: binder(each, name) for by, each in ops.items()}
            calls: dict[str, list[Callable[[], object]]] = {
                by: [partial(how(weight), x) for weight in weights] for by, how in prepare.items()
            }
            yield name, n, size, calls


def binder(ops: Ops, name: str) -> Callable[[torch.Tensor], Linear]:
    """What a model binds such a weight with."""
    if "gate" in name:
        return ops.gated_linear
    return ops.linear if "head" in name else ops.linear_in_parts


def measure_layers(ops: dict[str, Ops]) -> Iterator[Case]:
    """All steps of layers but attention, one after the other, as they follow each other in a model."""
    for name, (count, hidden, q_heads, kv_heads, mlp) in LAYERS.items():
        sizes = ((q_heads + 2 * kv_heads) * 128, hidden), (hidden, q_heads * 128), (2 * mlp, hidden), (hidden, mlp)
        weights = [[random(*size) / 50 for size in sizes] for _ in range(count)]
        for n in (1, 8, 32, 128, 256):
            x = random(n, hidden)
            calls: dict[str, list[Callable[[], object]]] = {
                by: [make_layers(each, weights, x, kv_heads)] for by, each in ops.items()
            }
            yield name, n, 2 * count * sum(out * columns for out, columns in sizes), calls


def make_layers(ops: Ops, weights: list[list[torch.Tensor]], x: torch.Tensor, kv_heads: int) -> Callable[[], object]:
    """Layers with those weights: ``qkv``, ``o``, ``gate_up`` and ``down``."""
    n, hidden = x.shape
    norm, head_norm, angles = random(hidden), random(128), torch.rand(n, 128, device=x.device)
    keys, values = (random(n, 1, kv_heads, 128) for _ in range(2))
    slots = torch.arange(n, device=x.device)
    layers = [
        (ops.linear_in_parts(qkv), ops.linear_in_parts(o), ops.gated_linear(gate_up), ops.linear_in_parts(down))
        for qkv, o, gate_up, down in weights
    ]

    def run() -> object:
        residual = x.clone()
        now = ops.rms_norm(residual, norm, 1e-6)
        for qkv, o, gate_up, down in layers:
            heads = qkv(now)
            heads = heads.view(*heads.shape[:-1], -1, 128)
            q = ops.rotate_and_store(heads, angles, keys, values, slots, head_norm, head_norm)
            now, residual = ops.add_rms_norm(o(q.flatten(1)), residual, norm, 1e-6)
            now, residual = ops.add_rms_norm(down(gate_up(now)), residual, norm, 1e-6)
        return now

    return run


def measure_draws(ops: dict[str, Ops]) -> Iterator[Case]:
    """Draws from the vocabulary of Qwen3."""
    vocabulary = 151_936
    for n in (1, 16, 256):
        for spread, (deviation, most) in SPREADS.items():
            logits = [random(n, vocabulary) * deviation for _ in range(2 if n > 64 else 64)]
            for x in logits:
                x[:, ::2000] += torch.linspace(0, most, -(-vocabulary // 2000), device="cuda")
            for name, (temperature, top_k, top_p) in FILTERS.items():
                batch = SamplingBatch(
                    temperature=torch.full((n,), temperature, device="cuda"),
                    top_k=torch.full((n,), top_k, dtype=torch.int32, device="cuda"),
                    top_p=torch.full((n,), top_p, device="cuda"),
                    min_p=torch.zeros(n, device="cuda"),
                    seed=torch.arange(n, device="cuda"),
                    position=torch.arange(n, device="cuda"),
                    all_greedy=temperature == 0,
                    any_filter=top_k > 0 or top_p < 1,
                )
                calls: dict[str, list[Callable[[], object]]] = {
                    by: [partial(each.sample, x, batch) for x in logits] for by, each in ops.items()
                }
                yield f"sample, {spread}, {name}", n, 2 * n * vocabulary, calls


def random(*size: int) -> torch.Tensor:
    """bfloat16 numbers on the device."""
    return torch.randn(size, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    main()
