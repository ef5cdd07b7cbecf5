"""A quick look at the figures that matter most, against ``transformers`` in the same run: ``make bench-smoke``.

Both engines are up the whole time and take turns, so that a drift of the machine's speed meets both.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import msgspec
import typer

from tpserve.bench import workload
from tpserve.bench.arguments import run
from tpserve.bench.client import complete, summarise
from tpserve.bench.host import about
from tpserve.bench.server import serving
from tpserve.bench.transformers_peer import TransformersPeer
from tpserve.weights.source import resolve_model

__all__ = ["main"]

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
WORKLOAD = f"{PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, greedy"
PACKAGES = ("tpserve", "torch", "transformers")


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each engine.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, for both engines.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of each engine.")] = 2,
    flags: Annotated[str, typer.Option(help="Further flags for tpserve launch.")] = "",
) -> None:
    """Measure start-up of the command line, one stream, and sixteen streams; print JSON."""
    folder = resolve_model("").path
    result: dict[str, Any] = {"about": about(PACKAGES), "workload": WORKLOAD, "help_seconds": _timed(repeats, _help)}
    server_flags = ["--dtype", dtype, "--threads", str(threads), *flags.split()]
    with serving(server_flags) as url, TransformersPeer(folder, dtype, threads) as peer:
        for streams in (1, 16):
            result[f"{streams} streams"] = _compare(url, peer, streams, repeats)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")


def _compare(url: str, peer: TransformersPeer, streams: int, repeats: int) -> dict[str, Any]:
    ours, theirs = [], []
    for repeat in range(repeats + 1):
        prompts = workload.fixed(streams, PROMPT_TOKENS, seed=repeat)
        ours.append(summarise(complete(url, prompts, OUTPUT_TOKENS)))
        theirs.append(peer.generate(prompts, OUTPUT_TOKENS))
    del ours[0], theirs[0]  # the warm-up
    return {
        "tpserve": ours,
        "transformers": theirs,
        "tokens_per_second_ratio": _ratio(
            [a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, theirs, strict=True)]
        ),
        "tpot_ratio": _ratio([a.tpot / b.tpot for a, b in zip(ours, theirs, strict=True)]) if streams == 1 else None,
    }


def _ratio(pairs: list[float]) -> dict[str, float]:
    return {"median": median(pairs), "min": min(pairs), "max": max(pairs)}


def _timed(repeats: int, action: Callable[[], None]) -> dict[str, float]:
    action()
    seconds = []
    for _ in range(repeats):
        start = time.monotonic()
        action()
        seconds.append(time.monotonic() - start)
    return _ratio(seconds)


def _help() -> None:
    subprocess.run([sys.executable, "-P", "-m", "tpserve.cli.main", "--help"], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    run(main)
