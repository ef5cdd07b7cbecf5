"""``tpserve bench serve``: whole servers under load, one against another."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tpserve.cli.common import interrupted, write_output
from tpserve.errors import ConfigError
from tpserve.outputs import check_apart, check_output

if TYPE_CHECKING:
    from tpserve.bench.serve.arms import Arm
    from tpserve.bench.serve.measure import Measurement, Plan

__all__ = ["serve"]

BLOCKS = 6


def serve(
    url: Annotated[
        str | None, typer.Option(help="A server that runs already, of whatever kind.", show_default=False)
    ] = None,
    a: Annotated[
        str | None,
        typer.Option("--a", metavar="FLAGS", help="The baseline: flags of tpserve launch, such as '--sync gloo'."),
    ] = None,
    b: Annotated[str | None, typer.Option("--b", metavar="FLAGS", help="What is held against it.")] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"How often each arm runs, each time on a fresh server; {BLOCKS} for two arms, else 1.",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of each run.")] = 100,
    request_rate: Annotated[
        str, typer.Option(metavar="RATE,…", help="Requests a second that arrive; inf: all at once; a list: a sweep.")
    ] = "inf",
    burstiness: Annotated[
        float, typer.Option(min=0.001, help="1: Poisson arrivals; less: in bursts; more: steadier.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="The most requests in flight.", show_default=False)
    ] = None,
    dataset_name: Annotated[
        Literal["random", "sharegpt"], typer.Option(help="Random token ids, or conversations of --dataset-path.")
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Conversations in ShareGPT's JSON.", show_default=False)
    ] = None,
    backend: Annotated[
        Literal["openai", "openai-chat"],
        typer.Option(help="Ask for completions, or for chats; random takes the first."),
    ] = "openai",
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 128,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate for it.")] = 64,
    random_range_ratio: Annotated[
        float, typer.Option(min=0, max=0.999, help="Both lengths vary by this share up and down.")
    ] = 0.0,
    random_vocab_size: Annotated[int, typer.Option(min=101, help="Random ids lie from 100 up to this.")] = 32000,
    sharegpt_output_len: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens to generate; if left out, as long as the answer.", show_default=False),
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Go on past the end of text; as a default, random does and sharegpt does not.",
            show_default=False,
        ),
    ] = None,
    metric_percentiles: Annotated[str, typer.Option(metavar="P,…", help="Percentiles of latencies.")] = "50,90,99",
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests to each server that do not count.")] = 2,
    model: Annotated[str, typer.Option(help="Its name; if left out, the first that the server has.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, arrivals, the order and the statistics.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write all figures.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write a page with plots.")] = None,
) -> None:
    """Measure whole servers under load, one against another.

    --url measures a server that runs already, and waits up to 600 s for one that is starting. --a and --b start servers
    with tpserve launch, on free ports; they take turns in random order, and the second is held against the first. The
    flags of the load are those of vLLM's bench. What is interrupted reports the blocks that are whole.
    """
    from tpserve.bench.serve.arrivals import read_rates
    from tpserve.bench.serve.measure import Plan
    from tpserve.bench.serve.prompts import Workload

    check_output(json, html)
    reports, dataset = [("--json", json), ("--html", html)], [("the file of --dataset-path", dataset_path)]
    check_apart(reports, dataset)
    if (dataset_name == "sharegpt") != (dataset_path is not None):
        raise ConfigError("--dataset-name sharegpt and --dataset-path FILE go together")
    if dataset_name == "random" and backend != "openai":
        raise ConfigError("--dataset-name random sends token ids, which chats do not take", "Leave --backend out")
    is_random = dataset_name == "random"
    workload = Workload(
        dataset=dataset_name,
        dataset_path=str(dataset_path.resolve()) if dataset_path else "",
        backend=backend,
        num_prompts=num_prompts,
        input_len=random_input_len,
        output_len=random_output_len if is_random else sharegpt_output_len,
        range_ratio=random_range_ratio,
        vocab_size=random_vocab_size,
        ignore_eos=is_random if ignore_eos is None else ignore_eos,
    )
    rates, percentiles = read_rates(request_rate), _percentiles(metric_percentiles)
    arms = _arms(url, a, b)
    written = [file for arm in arms for file in arm.outputs()]
    check_apart([*reports, *written], [*dataset, *(file for arm in arms for file in arm.inputs())])
    plan = Plan(
        arms=arms,
        workload=workload,
        rates=rates,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        blocks=blocks or (BLOCKS if len(arms) > 1 else 1),
        warm_ups=num_warmups,
        percentiles=percentiles,
        model=model,
        seed=seed,
    )
    _report(plan, _measure(plan), json, html)


def _arms(url: str | None, a: str | None, b: str | None) -> list[Arm]:
    from tpserve.bench.serve.arms import launched, running

    if url is not None:
        if a is not None or b is not None:
            raise ConfigError("--url measures one server, --a and --b start their own", "Leave one of them out")
        return [running(url)]
    if b is not None and a is None:
        raise ConfigError("--b is held against --a, which is not there", "--b needs --a: --a '' is all defaults")
    flags = {"A": a, "B": b}
    arms = [launched(name, text) for name, text in flags.items() if text is not None]
    if not arms:
        raise ConfigError("there is nothing to measure", "Write --url URL, or --a 'FLAGS' --b 'FLAGS'")
    return arms


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < percentile < 100 for percentile in found):
        raise ConfigError(f"--metric-percentiles: expected numbers between 0 and 100 such as 50,99, found {text!r}")
    return tuple(sorted(set(found)))


def _measure(plan: Plan) -> Measurement:
    """Measure, with a bar if somebody looks.

    A SIGTERM is taken as a Ctrl-C; and that counts for a shell's background job too, which starts deaf to it.
    """
    from rich.console import Console
    from rich.progress import Progress

    from tpserve.bench.serve.measure import measure

    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    terminate = signal.signal(signal.SIGTERM, _stop)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=plan.blocks * len(plan.arms) * len(plan.rates))
        try:
            return measure(plan, lambda arm: bar.update(task, advance=1, description=arm))
        except KeyboardInterrupt as stop:
            raise interrupted(stop) from None
        finally:
            signal.signal(signal.SIGTERM, terminate)
            signal.signal(signal.SIGINT, interrupt)


def _stop(signum: int, frame: object) -> None:
    raise KeyboardInterrupt(signum)


def _report(plan: Plan, measured: Measurement, json: Path | None, html: Path | None) -> None:
    from tpserve.bench.serve.report_html import page
    from tpserve.bench.serve.report_terminal import print_report
    from tpserve.bench.serve.summary import summarise
    from tpserve.bench.terminal import report_console

    report = summarise(plan, measured, sys.argv)
    print_report(report, report_console())
    if json is not None:
        write_output(json, report.encode())
    if html is not None:
        write_output(html, page(report).encode())
    if report.cut_short:
        raise typer.Exit(128 + report.cut_short.signal)
    if not report.is_sound:
        raise typer.Exit(1)
