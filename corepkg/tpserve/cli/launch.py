"""``tpserve launch``: start a server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from tpserve.cli.common import check_model, file_path, print_json, print_table
from tpserve.config import ServeConfig
from tpserve.errors import ConfigError, LaunchError
from tpserve.outputs import check_apart, outputs
from tpserve.settings import load_settings, unknown_variables

__all__ = ["app"]

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich", add_completion=False)

DEFAULTS = ServeConfig()

MODEL = "Model and numbers"
NETWORK = "Network"
PARTS = "Parts that are plugins"
CAPACITY = "Capacity"
PROCESSES = "Processes and placement"
TIMES = "Times, in seconds"


def _flag(field: str, panel: str, help: str) -> OptionInfo:
    """A flag for one setting; None, its value when it is not given, leaves the setting to other sources."""
    default = getattr(DEFAULTS, field)
    flag: OptionInfo = typer.Option(
        help=f"{help} [dim]default: {'auto' if default is None else default}[/dim]",
        show_default=False,
        rich_help_panel=panel,
    )
    return flag


@app.command()
def launch(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face folder, a .gguf file, or an id on its hub; the embedded model if left out.",
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model, if not by its own name.", rich_help_panel=MODEL)
    ] = None,
    device: Annotated[str | None, _flag("device", MODEL, "auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, _flag("dtype", MODEL, "auto, float32, bfloat16 or float16.")] = None,
    load_format: Annotated[
        str | None, _flag("load_format", MODEL, "auto, safetensors, gguf, or dummy: drawn at random.")
    ] = None,
    tp: Annotated[int | None, _flag("tp", MODEL, "Ranks that share the model (tensor parallelism).")] = None,
    host: Annotated[str | None, _flag("host", NETWORK, "Address to listen on.")] = None,
    port: Annotated[int | None, _flag("port", NETWORK, "TCP port; 0 takes a free one.")] = None,
    transport: Annotated[str | None, _flag("transport", PARTS, "Carries messages to the ranks.")] = None,
    pipe_transport: Annotated[
        str | None, _flag("pipe_transport", PARTS, "Carries messages between other processes; auto: the same.")
    ] = None,
    sync: Annotated[str | None, _flag("sync", PARTS, "Tells the ranks what arrived in a round.")] = None,
    policy: Annotated[str | None, _flag("policy", PARTS, "Decides what runs next.")] = None,
    attn: Annotated[str | None, _flag("attn", PARTS, "Attention kernels; two as PREFILL,DECODE.")] = None,
    ops: Annotated[str | None, _flag("ops", PARTS, "Kernels of all other layer steps, and the sampler.")] = None,
    comm: Annotated[str | None, _flag("comm", PARTS, "Combines tensors between ranks.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "-o",
            "--option",
            metavar="KIND.KEY=VALUE",
            help="Set a plugin's option: -o transport.send_buffer=8192; may be repeated.",
            rich_help_panel=PARTS,
        ),
    ] = None,
    page_size: Annotated[int | None, _flag("page_size", CAPACITY, "Tokens a KV page.")] = None,
    kv_tokens: Annotated[
        int | None, _flag("kv_tokens", CAPACITY, "Tokens in the KV pool; 0: from --memory-fraction.")
    ] = None,
    memory_fraction: Annotated[
        float | None, _flag("memory_fraction", CAPACITY, "Share of the device's memory for weights, steps and KV pool.")
    ] = None,
    max_context: Annotated[
        int | None, _flag("max_context", CAPACITY, "Longest sequence in tokens; 0: the model's own limit.")
    ] = None,
    max_running_requests: Annotated[
        int | None, _flag("max_running_requests", CAPACITY, "Most requests in a batch.")
    ] = None,
    max_step_tokens: Annotated[
        int | None,
        _flag("max_step_tokens", CAPACITY, "Most tokens that one step computes; 0: what suits device and model."),
    ] = None,
    chunked_prefill_size: Annotated[
        int | None,
        _flag("chunked_prefill_size", CAPACITY, "Most tokens of one prompt in a step; 0: as many as a step may have."),
    ] = None,
    cache: Annotated[
        str | None, _flag("cache", CAPACITY, "radix keeps computed pages for prompts that begin alike; or none.")
    ] = None,
    overlap: Annotated[
        bool | None,
        _flag(
            "overlap",
            CAPACITY,
            "Decide the next round while a step is computed, or wait for it; auto: on a GPU.",
        ),
    ] = None,
    cuda_graph: Annotated[
        bool | None, _flag("cuda_graph", PARTS, "Replay decode steps from CUDA graphs, where all parts allow it.")
    ] = None,
    max_requests: Annotated[
        int | None, _flag("max_requests", CAPACITY, "Most requests in flight; past it, 503 with Retry-After.")
    ] = None,
    max_queued_requests: Annotated[
        int | None,
        _flag(
            "max_queued_requests", CAPACITY, "Most beyond those that run; past it, 429 with Retry-After. 0: no limit."
        ),
    ] = None,
    max_messages_per_round: Annotated[
        int | None, _flag("max_messages_per_round", CAPACITY, "Most messages that one round takes.")
    ] = None,
    max_round_bytes: Annotated[
        int | None, _flag("max_round_bytes", CAPACITY, "A round takes no more messages at this many bytes.")
    ] = None,
    tokenizers: Annotated[int | None, _flag("tokenizers", PROCESSES, "Tokenizer processes.")] = None,
    detokenizers: Annotated[int | None, _flag("detokenizers", PROCESSES, "Detokenizer processes.")] = None,
    threads: Annotated[
        int | None, _flag("threads", PROCESSES, "Compute threads a rank on the CPU; 0 shares the cores out.")
    ] = None,
    cpu_affinity: Annotated[
        str | None, _flag("cpu_affinity", PROCESSES, "auto, none, or the cores of each rank: 0-3;4-7.")
    ] = None,
    base_device: Annotated[int | None, _flag("base_device", PROCESSES, "Rank 0's accelerator.")] = None,
    device_step: Annotated[
        int | None, _flag("device_step", PROCESSES, "From one rank's accelerator to the next; 0: all on one.")
    ] = None,
    max_restarts: Annotated[
        int | None, _flag("max_restarts", PROCESSES, "How often processes that died are started again.")
    ] = None,
    startup_timeout: Annotated[float | None, _flag("startup_timeout", TIMES, "Until the server must serve.")] = None,
    drain_timeout: Annotated[
        float | None, _flag("drain_timeout", TIMES, "What a stopping server gives running requests.")
    ] = None,
    heartbeat: Annotated[float | None, _flag("heartbeat", TIMES, "Between signs of life of an idle leader.")] = None,
    watchdog: Annotated[float | None, _flag("watchdog", TIMES, "Silence after which a process counts as dead.")] = None,
    record: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Record all that is decided, for tpserve replay.", rich_help_panel=PROCESSES),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Trace some steady steps of each rank.", rich_help_panel=PROCESSES),
    ] = None,
    log_level: Annotated[str | None, _flag("log_level", NETWORK, "debug, info, warning or error.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A YAML file of settings.", parser=file_path)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the server would be made of and why, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Start a server.

    Flags win over TPSERVE_ variables, those over the file of --config, and that over the defaults.
    """
    check_model(model)
    given = {name: value for name, value in locals().items() if name in ServeConfig.__struct_fields__}
    settings = load_settings(given, option or [], config, os.environ)
    check_apart(outputs(settings), [("the file of --config", config)])
    for warning in unknown_variables(os.environ):
        typer.echo(f"warning: {warning}", err=True)
    if as_json and not dry_run:
        raise ConfigError("--json goes with --dry-run")
    if dry_run:
        _print_plan(settings, as_json)
    else:
        _serve(settings)


def _print_plan(settings: ServeConfig, as_json: bool) -> None:
    from tpserve.launch.banner import describe
    from tpserve.launch.plan import Plan

    _check_address(settings)
    plan = Plan.make(settings, _note)
    if as_json:
        print_json(plan)
    else:
        print_table([("what", "which", "why"), *describe(plan)])


def _check_address(settings: ServeConfig) -> None:
    """See that a server could listen there; a port that is taken now may be free when it starts."""
    from tpserve.launch.server import listen

    try:
        listen(settings.host, 0).close()
    except LaunchError:
        listen(settings.host, settings.port).close()  # to be told of the port that was asked for


def _serve(settings: ServeConfig) -> None:
    from tpserve.launch.server import launch as run

    sys.exit(run(settings))


def _note(text: str) -> None:
    typer.echo(text, err=True)
