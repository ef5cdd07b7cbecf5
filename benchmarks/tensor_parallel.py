"""The engine on 1, 2, 4 and 8 GPUs: tokens a second, and what sums and agreeing on rounds take of a decode step.

    python benchmarks/tensor_parallel.py --shape llama-3.1-8b --tp 1,2 --set ops=triton
    python benchmarks/tensor_parallel.py --shape llama-3.1-8b --shape qwen3-32b --tp 1,2,4,8

Dummy weights; 256 requests of 100-1024 tokens in and out, all at once (``tpserve bench offline --workload mixed``).
Each size runs in processes of its own; the last run counts, for a trace is written in the first. Of that trace, 32
steps of the full batch on rank 0: milliseconds a step, the share in which sums between GPUs run (waiting for the other
ranks counts), and the share in which nothing runs. Then as many ranks without a model: what an empty round takes
between steps of that length (``tpserve bench transport``), in microseconds, p50. JSON lines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tpserve.bench.arguments import MANY, check_gpus, setting, whole
from tpserve.bench.shapes import SHAPES
from tpserve.bench.trace import read_trace

STEPS = 32
"""Steps of a trace."""

SUMS = ("nccl", "add_up")
"""How the names of the kernels that sum between GPUs begin."""

ARMS = ("zmq,sync=shm", "zmq,sync=inband", "nng,sync=shm")


def tpserve(*words: str) -> None:
    """Run a command of tpserve; what it reports goes to its file, and why it fails it says itself."""
    code = subprocess.run([sys.executable, "-m", "tpserve", *words], check=False).returncode
    if code:
        sys.exit(code)


def engine(shape: str, size: int, settings: list[str], flags: list[str], folder: Path) -> dict[str, Any]:
    """Measure one size."""
    report = folder / "offline.json"
    given = ["cache=none", "max_context=4096", f"tp={size}", f"profile={folder}", *settings]
    tpserve("bench", "offline", *given, "--shape", shape, "--workload", "mixed", *flags, "--json", str(report))
    arm = json.loads(report.read_bytes())["arms"]["a"]
    run = arm["runs"][-1]
    gpu = read_trace(folder / "rank0.json")
    sums = sum(seconds for name, (seconds, _) in gpu.kernels.items() if name.startswith(SUMS))
    return {
        "shape": shape,
        "tp": size,
        "start, s": round(arm["start_seconds"], 1),
        "tokens/s": round(run["output_tokens"] / run["seconds"], 1),
        "ms a step": round(1e3 * gpu.seconds / STEPS, 3),
        "sums": round(sums / gpu.seconds, 4),
        "idle": round(gpu.idle, 4),
    }


def rounds(size: int, step: float, folder: Path) -> dict[str, float]:
    """What an empty round takes the slowest rank between steps of ``step`` milliseconds: p50 in µs of each arm."""
    report = folder / "rounds.json"
    arms = [word for arm in ARMS for word in ("--arm", arm)]
    pace = ["--step", str(1e3 * step), "--messages", "0", "--rounds", "100", "--repeats", "3", "--idle", "0"]
    tpserve("bench", "transport", *arms, "--ranks", str(size), *pace, "--json", str(report))
    return {each["arm"]: each["latency_us"]["p50"] for each in json.loads(report.read_bytes())["outcomes"]}


def sizes(text: str) -> list[int]:
    """A list as in 1,2,4."""
    return [whole(1, 64)(word) for word in text.split(",")]


def main() -> None:
    """Measure all sizes of all shapes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--tp", type=sizes, default="1,2,4,8", help="sizes, as many GPUs as there are at the most")
    parser.add_argument(
        "--set", action="append", default=[], type=setting, metavar="SETTING=VALUE", help="of tpserve; may be repeated"
    )
    parser.add_argument("--requests", type=whole(1, MANY), default=256)
    parser.add_argument("--repeats", type=whole(1, MANY), default=2)
    options = parser.parse_args()
    check_gpus(parser, max(options.tp))
    flags = ["--requests", str(options.requests), "--repeats", str(options.repeats)]
    for shape in options.shape or ["llama-3.1-8b", "qwen3-32b"]:
        for size in options.tp:
            with tempfile.TemporaryDirectory() as name:
                row = engine(shape, size, options.set, flags, Path(name))
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
                if size > 1:
                    took = rounds(size, row["ms a step"], Path(name))
                    sys.stdout.write(json.dumps({"shape": shape, "tp": size, "an empty round, µs": took}) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
