"""``transformers.generate`` on a benchmark's workload, in a process of its own.

Reads requests as JSON lines, ``{"prompts": […], "max_tokens": n}``, and answers each with one line.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

__all__ = ["Measured", "TransformersPeer"]


class Asked(msgspec.Struct, frozen=True):
    """One batch to generate."""

    prompts: list[list[int]]
    max_tokens: int


class Measured(msgspec.Struct, frozen=True):
    """How it went; times in seconds.

    Attributes:
        output_tokens: of the batch.
        wall: of the whole batch.
        tokens_per_second: the one over the other.
        tpot: time per step after the first.
    """

    output_tokens: int
    wall: float
    tokens_per_second: float
    tpot: float


class TransformersPeer:
    """The process, seen from the benchmark.

    Args:
        folder: the model.
        dtype: ``float32`` or ``bfloat16``.
        threads: compute threads.
    """

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        command = [sys.executable, "-P", "-m", "tpserve.bench.transformers_peer", str(folder), dtype, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Measured:
        """Generate for one batch, greedy and past the end of text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(Asked(prompts, max_tokens)) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Measured)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Clock:
    """A streamer that keeps the time of each step; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: object) -> None:
        """A step is over."""
        self.times.append(time.monotonic())

    def end(self) -> None:
        """All is over."""


def main(folder: str, dtype: str, threads: str) -> None:
    """Answer batch after batch until standard input ends."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(threads))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    for line in sys.stdin.buffer:
        asked = msgspec.json.decode(line, type=Asked)
        sys.stdout.buffer.write(msgspec.json.encode(_generate(model, asked)) + b"\n")
        sys.stdout.buffer.flush()


def _generate(model: Any, asked: Asked) -> Measured:
    import torch

    ids = torch.tensor(asked.prompts)
    clock = Clock()
    settings: dict[str, Any] = {"do_sample": False, "min_new_tokens": asked.max_tokens, "pad_token_id": 0}
    if len(asked.prompts) == 1:
        settings["streamer"] = clock
    start = time.monotonic()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.max_tokens, eos_token_id=None, **settings
        )
    wall = time.monotonic() - start
    tokens = int(out[:, ids.shape[1] :].numel())
    steps = clock.times[1:]
    tpot = (steps[-1] - steps[0]) / (len(steps) - 1) if steps else 0.0
    return Measured(tokens, wall, tokens / wall, tpot)


if __name__ == "__main__":
    main(*sys.argv[1:])
