"""How fast the ops are here, as JSON: ``python -m tpserve_attn_triton.bench_ops``.

Bytes are those that must be read and written once, and are held against the rate of a large copy. Inputs take turns, so
that none is found in L2, and a CUDA graph holds the calls, so that launching costs nothing. Times are medians; torch's
operators are timed beside.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tpserve.api import NoOptions, Ops, SamplingBatch
from tpserve.ops.reference import TorchOps
from tpserve_attn_triton.bench import copy_rate, time_graph
from tpserve_attn_triton.ops import TritonOps

__all__ = ["main"]

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
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    copy = copy_rate()
    print(json.dumps({"device": torch.cuda.get_device_name(), "copy GB/s": round(copy)}), flush=True)
    options = NoOptions()
    ops: dict[str, Ops] = {"triton": TritonOps(options), "torch": TorchOps(options)}
    for measure in (measure_steps, measure_products, measure_draws):
        for name, n, moved, calls in measure(ops):
            line: dict[str, object] = {"step": name, "rows": n}
            for by, some in calls.items():
                seconds = time_graph(some)
                line[f"{by} us"] = round(1e6 * seconds, 2)
                if by == "triton":
                    line |= {"GB/s": round(moved / seconds / 1e9), "of copy": round(moved / seconds / 1e9 / copy, 3)}
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
        caches = [random(1 + n // 16, 16, 8, 128) for _ in range(2)]
        slots = torch.randperm(n, device="cuda")
        angles = torch.rand(n, 128, device="cuda")
        heads = [random(n, 32, 128) for _ in range(copies)]
        yield (
            "rotate_and_store, normed",
            n,
            n * 128 * (4 * 32 + 4) + 8 * n,
            {
                by: [partial(each.rotate_and_store, x, angles, *caches, slots, norm, norm) for x in heads]
                for by, each in ops.items()
            },
        )


def measure_products(ops: dict[str, Ops]) -> Iterator[Case]:
    """Products of few rows."""
    for name, (out, columns) in WEIGHTS.items():
        size = 2 * out * columns
        weights = [random(out, columns) for _ in range(max(2, POOL // size))]
        for n in (1, 2, 8, 16):
            x = random(n, columns)
            prepare = {by: each.gated_linear if "gate" in name else each.linear for by, each in ops.items()}
            calls: dict[str, list[Callable[[], object]]] = {
                by: [partial(how(weight), x) for weight in weights] for by, how in prepare.items()
            }
            yield name, n, size, calls


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
