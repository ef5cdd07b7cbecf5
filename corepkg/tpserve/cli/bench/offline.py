"""``tpserve bench offline``: engines without a server, one choice of settings against another."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tpserve.bench.arguments import MANY
from tpserve.cli.common import write_output
from tpserve.errors import ConfigError
from tpserve.outputs import check_output

if TYPE_CHECKING:
    from tpserve.bench.offline import Run

__all__ = ["offline"]

REQUESTS = {"mixed": 256, "fixed": 16, "shared": 256, "stream": 1}


def offline(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING=VALUE",
            help="Settings of all arms: dtype=float32 tp=2. With profile=DIR each rank writes a trace.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="A folder, a .gguf file or a hub id.", show_default="the embedded model"),
    ] = "",
    shape: Annotated[
        Literal["qwen3-0.6b", "llama-3.1-8b", "qwen3-32b"] | None,
        typer.Option(help="Instead of a model: its shape, with dummy weights.", show_default=False),
    ] = None,
    workload: Annotated[
        Literal["mixed", "fixed", "shared", "stream"],
        typer.Option(
            help="100–1024 tokens in and out; 128 in and 64 out; up to 8 groups that share 512 tokens, 16 out; "
            "100 in and 256 out."
        ),
    ] = "fixed",
    requests: Annotated[
        int | None,
        typer.Option(min=1, max=MANY, help="All at once; 256, 16, 256 and 1 unless given.", show_default=False),
    ] = None,
    a: Annotated[str | None, typer.Option("--a", metavar="SETTING=VALUE,…", help="The baseline: cache=none.")] = None,
    b: Annotated[str | None, typer.Option("--b", metavar="SETTING=VALUE,…", help="What is held against it.")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=MANY, help="Runs of each arm that count; one more warms up.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts and the order of arms.")] = 0,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Where the report goes.", show_default="standard output"),
    ] = None,
) -> None:
    """Measure tokens a second of ``tpserve.LLM`` on one workload.

    With --a and --b two engines are up and take turns; without, there is one.
    """
    check_output(json)
    shared = _settings(settings or [])
    arms = {"a": shared | _settings(_parts(a or ""))}
    if b is not None:
        arms["b"] = shared | _settings(_parts(b))

    own = ["model" in each for each in arms.values()]
    # An arm may have another model than --model says, but not all of them; dummy weights are for all arms.
    named = {"--shape": shape, "--model": model, "model=": any(own) if shape else all(own)}
    given = [name for name, is_given in named.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} name a model each", "Give one of them")
    model = model or shared.get("model", "")

    import msgspec
    from msgspec.structs import replace

    from tpserve.bench.offline import Plan, measure
    from tpserve.bench.shapes import write_shape

    with TemporaryDirectory() as folder:
        if shape:
            model = str(write_shape(shape, Path(folder) / shape))
            arms = {name: {"load_format": "dummy"} | settings for name, settings in arms.items()}
        plan = Plan(model, workload, requests or REQUESTS[workload], repeats, seed)
        report = measure(plan, arms, _note, json)
    if shape:  # the folder is gone
        report = replace(report, plan=replace(plan, model=f"--shape {shape}"))
    text = msgspec.json.format(msgspec.json.encode(report)) + b"\n"
    if json is not None:
        write_output(json, text)
    else:
        sys.stdout.write(text.decode())
    for name, ratio in report.ratios.items():
        sys.stderr.write(f"{name} over a: {ratio or 'one run says nothing'}\n")


def _parts(text: str) -> list[str]:
    """The settings of an arm; a comma that no name and = follow is part of a value, as in attn=PREFILL,DECODE."""
    return re.split(r",+(?=[^,=]*=)", text.strip(","))


def _settings(words: list[str]) -> dict[str, str]:
    given = {}
    for word in filter(None, words):
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise ConfigError(f"{word}: no setting", "Write SETTING=VALUE, as in cache=none")
        setting = name.strip().replace("-", "_")
        if setting in given:
            raise ConfigError(f"{word}: {setting} is given twice", "Give it once: an arm's own goes before that of all")
        given[setting] = value
    return given


def _note(arm: str, repeat: int, run: Run) -> None:
    what = "warm-up" if repeat < 0 else f"run {repeat + 1}"
    steps = f", {1000 * run.tpot:.1f} ms a token" if run.tpot is not None else ""
    cached = f", {run.cached_tokens} of {run.prompt_tokens} prompt tokens cached" if run.cached_tokens else ""
    sys.stderr.write(f"{arm}, {what}: {run.tokens_per_second:.1f} tokens/s{steps}{cached}\n")
