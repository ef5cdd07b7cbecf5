"""mini-sglang and tpserve in turn on one GPU, on shapes with dummy weights: tokens a second and their ratios, as JSON.

    git clone https://github.com/sgl-project/mini-sglang; git -C mini-sglang checkout 20fcd7f
    python benchmarks/against_minisgl.py mini-sglang/python
    python benchmarks/against_minisgl.py mini-sglang/python --shape qwen3-0.6b --set attn=triton --set ops=triton
    python benchmarks/against_minisgl.py mini-sglang/python --repeats 0    # starts alone, when all is compiled
    python benchmarks/against_minisgl.py --engine tpserve --model FOLDER --repeats 0    # one engine, in this process

mini-sglang needs flashinfer-python (0.6.6 was seen working) and is set up as in its own offline benchmark: CUDA graphs
to 256, steps of 16,384 tokens, contexts to 4,096. Both engines keep no prefix cache: a repeat would find its prompts
there, and have computed other prompts before. Workloads: 256 requests of 100–1024 tokens in and out at temperature 0.6,
and one stream of 100 tokens in and 256 out, greedy; the median of the repeats counts.

Each engine runs in a process of its own, which prints a JSON line for each result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tpserve.bench.arguments import MANY, refusing, setting, whole
from tpserve.bench.shapes import SHAPES, write_shape
from tpserve.bench.workload import Workload, fixed, mixed
from tpserve.settings import load_settings
from tpserve.testing.models import make_tokenizer

WARM_UP = 1_000
"""Seed of the prompts that do not count."""

CONTEXT = 4096

MEASURED = ("qwen3-0.6b", "llama-3.1-8b")

Generate = Callable[[Workload], None]


def workloads(seed: int, requests: int = 256) -> dict[str, Workload]:
    """What is measured, by name."""
    return {"256 requests": mixed(requests, seed), "one stream": Workload(fixed(1, 100, seed, 200), [256])}


def minisgl(folder: str, settings: dict[str, str]) -> Generate:
    """Start mini-sglang."""
    import torch
    from minisgl.core import SamplingParams
    from minisgl.engine.engine import Engine
    from minisgl.llm import LLM

    def small_weights(self: Any, config: Any) -> dict[str, Any]:
        """Drawn as tpserve draws them: with its own dummy weights, activations overflow."""
        state = self.model.state_dict()
        return {
            name: torch.ones_like(each, device=self.device)
            if name.endswith("norm.weight")
            else torch.randn_like(each, device=self.device) * 0.02
            for name, each in state.items()
        }

    Engine._load_weight_state_dict = small_weights
    options: dict[str, Any] = {
        "max_seq_len_override": CONTEXT,
        "max_extend_tokens": 16384,
        "cuda_graph_max_bs": 256,
        "use_dummy_weight": True,
        "attention_backend": "fi",
        "cache_type": "naive",
        **settings,
    }
    llm = LLM(folder, **options)

    def generate(work: Workload) -> None:
        params = [SamplingParams(temperature=work.temperature, ignore_eos=True, max_tokens=n) for n in work.outputs]
        llm.generate(work.prompts, params)

    return generate


def tpserve(folder: str, settings: dict[str, str]) -> Generate:
    """Start tpserve."""
    from tpserve.messages import SamplingParams
    from tpserve.offline import LLM

    llm = LLM(folder, **{"load_format": "dummy", "cache": "none", "max_context": CONTEXT, **settings})

    def generate(work: Workload) -> None:
        params = [
            SamplingParams(temperature=work.temperature, ignore_eos=True, max_tokens=n, seed=seed)
            for seed, n in enumerate(work.outputs)
        ]
        completions = llm.generate(work.prompts, params)
        assert [len(each.token_ids) for each in completions] == work.outputs

    return generate


ENGINES = {"minisgl": minisgl, "tpserve": tpserve}


def run(engine: str, folder: str, settings: dict[str, str], repeats: int) -> None:
    """Measure one engine in this process."""
    begun = time.perf_counter()
    generate = ENGINES[engine](folder, settings)
    _say({"what": "start, s", "value": time.perf_counter() - begun})
    if not repeats:
        return
    for work in workloads(WARM_UP, requests=64).values():
        generate(work)
    for repeat in range(repeats):
        for name, work in workloads(repeat).items():
            begun = time.perf_counter()
            generate(work)
            _say({"what": name, "value": sum(work.outputs) / (time.perf_counter() - begun)})


def compare(options: argparse.Namespace) -> None:
    """Measure both in turn, shape by shape."""
    settings = {"minisgl": {}, "tpserve": dict(each.split("=", 1) for each in options.set)}
    paths = {"minisgl": [options.minisgl], "tpserve": []}
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shape or MEASURED:
            model = make_tokenizer(write_shape(shape, Path(folder) / shape))
            found = {
                name: _medians(_child(name, str(model), settings[name], options.repeats, paths[name]))
                for name in ENGINES
            }
            ratios = {what: found["tpserve"][what] / found["minisgl"][what] for what in found["minisgl"]}
            _say({"shape": shape, "settings": settings["tpserve"], **found, "tpserve over minisgl": ratios})


def _child(
    engine: str, model: str, settings: dict[str, str], repeats: int, paths: list[str]
) -> Iterator[dict[str, Any]]:
    command = [sys.executable, __file__, "--engine", engine, "--model", model, "--repeats", str(repeats)]
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            sys.stdout.write(f"{engine}: {line}")
            sys.stdout.flush()
            if line.startswith("{"):
                yield json.loads(line)
    if child.returncode:
        raise SystemExit(f"{engine} ended with exit code {child.returncode}")


def _medians(results: Iterator[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for result in results:
        values.setdefault(result["what"], []).append(result["value"])
    return {what: round(median(each), 2) for what, each in values.items()}


def _say(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Compare, or measure one engine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("minisgl", nargs="?", default="", help="the folder that holds its package minisgl")
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument(
        "--set", action="append", default=[], type=setting, metavar="SETTING=VALUE", help="of tpserve; may be repeated"
    )
    parser.add_argument("--repeats", type=whole(0, MANY), default=3, help="that count; 0: how long a start takes")
    parser.add_argument("--engine", choices=ENGINES, help="measure one alone, in this process")
    parser.add_argument("--model", metavar="FOLDER", help="what --engine serves")
    options = parser.parse_args()
    settings = dict(each.split("=", 1) for each in options.set)
    if options.engine != "minisgl":
        with refusing(parser):
            load_settings(settings, [], None, os.environ, label=str)
    if options.engine:
        if not options.model or not Path(options.model).is_dir():
            parser.error(f"--engine needs a folder as --model, found {options.model!r}")
        run(options.engine, options.model, settings, options.repeats)
    else:
        if not options.minisgl or not Path(options.minisgl, "minisgl").is_dir():
            parser.error(f"expected the folder that holds its package minisgl, found {options.minisgl!r}")
        compare(options)


if __name__ == "__main__":
    main()
