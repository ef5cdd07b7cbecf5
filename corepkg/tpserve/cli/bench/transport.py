"""``tpserve bench transport``: rounds over one choice of transport and synchronisation against another."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tpserve.cli.common import interrupted, write_output
from tpserve.errors import ConfigError
from tpserve.outputs import check_apart, check_output
from tpserve.settings import load_settings

if TYPE_CHECKING:
    from tpserve.bench.transport.measure import Measurement, Plan

__all__ = ["transport"]

RATE = 1000.0


def transport(
    axes: Annotated[
        list[str] | None, typer.Argument(metavar="AXIS", help="Further axes of --matrix.", show_default=False)
    ] = None,
    a: Annotated[
        str | None,
        typer.Option("--a", metavar="ARM", help="The baseline: zmq, transport=zmq,sync=gloo, or ancestor."),
    ] = None,
    b: Annotated[str | None, typer.Option("--b", metavar="ARM", help="What is held against it.")] = None,
    arm: Annotated[list[str] | None, typer.Option("--arm", metavar="ARM", help="One more; may be repeated.")] = None,
    matrix: Annotated[
        str | None,
        typer.Option(metavar="AXIS", help="Every combination: --matrix transport=zmq,nng sync=gloo,inband,shm."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("-o", "--option", metavar="KIND.KEY=VALUE", help="Set a plugin's option on all arms."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Ranks of each arm.")] = 2,
    messages: Annotated[
        str | None, typer.Option(metavar="N,…", help="Messages a round; 0: empty rounds; 1 if not given.")
    ] = None,
    size: Annotated[str, typer.Option(metavar="BYTES,…", help="Bytes of a message: 64,300,64K,16M.")] = "300",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each case in a block; fewer of large ones.")] = 1000,
    warm_up: Annotated[int, typer.Option(min=0, help="Rounds before each case that do not count.")] = 50,
    gap: Annotated[float, typer.Option(min=0, help="Microseconds between paced rounds: ranks fall asleep.")] = 0,
    step: Annotated[
        float, typer.Option(min=0, help="Microseconds that every rank computes between paced rounds, as a server does.")
    ] = 0,
    free_running: Annotated[
        bool, typer.Option("--free-running", help="The leader waits for nobody: what goes through?")
    ] = False,
    arrival: Annotated[
        Literal["poisson", "burst", "trace"] | None,
        typer.Option(help="Messages arrive by themselves, and their latency counts from then.", show_default=False),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help=f"Messages a second that arrive on average; {RATE:g} if not given."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help='Arrivals, one {"at": SECONDS, "size": BYTES} a line.')
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Blocks: in each every arm runs once, in fresh processes.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the order, the messages and the statistics.")] = 0,
    idle: Annotated[float, typer.Option(min=0, help="Seconds of each run to wait for nothing; 0: none.")] = 2.0,
    heartbeat: Annotated[float, typer.Option(help="Seconds between an idle leader's signs of life.")] = 1.0,
    watchdog: Annotated[float, typer.Option(help="Seconds of silence after which a rank gives up.")] = 30.0,
    cpu_affinity: Annotated[str, typer.Option(help="auto, none, or the cores of each rank: 0;1.")] = "auto",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write all figures.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write a page with plots.")] = None,
) -> None:
    """Measure rounds over one choice of transport and synchronisation against another.

    A round is what the scheduler of a server sees: it begins when the leader has the messages, and is over when all
    ranks hold them, decoded. No model is needed. An arm is a transport, or key=value pairs of transport, sync, name and
    options such as transport.batch; the first is the baseline of every verdict. What is interrupted reports the blocks
    that are whole.
    """
    from tpserve.bench.transport.arms import matrix as combinations
    from tpserve.bench.transport.arms import read_arms
    from tpserve.bench.transport.cases import Load, make_cases, read_numbers, read_sizes
    from tpserve.bench.transport.measure import Plan
    from tpserve.plugins.registry import Registry

    if axes and matrix is None:
        raise ConfigError(f"{' '.join(axes)}: only --matrix takes axes", "Write --matrix AXIS AXIS or --a ARM --b ARM")
    if b is not None and a is None:
        raise ConfigError("--b is held against --a, which is not there", "--b needs --a: write --a ARM --b ARM")
    check_output(json, html)
    check_apart([("--json", json), ("--html", html)], [("the file of --trace", trace)])
    named = [text for text in (a, b) if text is not None]
    named += arm or []
    crossed = combinations([axis for axis in (matrix, *(axes or [])) if axis])
    texts = [*named, *(text for text in crossed if text not in named)]
    if arrival and free_running:
        raise ConfigError("--arrival and --free-running are two different paces", "Leave one of them out")
    for flag, time in (("--gap", gap), ("--step", step)):
        if time and (arrival or free_running):
            raise ConfigError(f"{flag} lies between paced rounds", "Leave it out, or --arrival and --free-running")
    if rate is not None and arrival not in ("poisson", "burst"):
        raise ConfigError("--rate is that of messages that arrive by themselves", "Add --arrival poisson or burst")
    if trace is not None and arrival != "trace":
        raise ConfigError("--trace says when messages arrive by themselves", "Add --arrival trace")
    if messages is not None and arrival == "trace":
        raise ConfigError(
            "--messages is how many there are in a round, and a trace says when each comes", "Leave it out"
        )
    pace = arrival or ("free" if free_running else "paced")
    load = Load(pace=pace, rate=RATE if rate is None else rate, gap=gap, step=step, trace=trace and trace.resolve())
    if not texts:
        raise ConfigError("there is nothing to compare", "Write --a ARM --b ARM or --matrix AXIS AXIS")
    cases = make_cases(
        load, read_numbers("1" if messages is None else messages, "--messages"), read_sizes(size), rounds
    )
    settings = load_settings({"heartbeat": heartbeat, "watchdog": watchdog}, option or [], None, os.environ)
    plan = Plan(
        arms=read_arms(texts, settings.options, Registry.discover(), is_pair=b is not None),
        cases=cases,
        load=load,
        ranks=ranks,
        blocks=repeats,
        warm_up=warm_up,
        idle=idle,
        heartbeat=settings.heartbeat,
        watchdog=settings.watchdog,
        cpu_affinity=cpu_affinity,
        seed=seed,
    )
    _report(plan, _measure(plan), json, html)


def _measure(plan: Plan) -> Measurement:
    """Measure, with a bar if somebody looks."""
    from rich.console import Console
    from rich.progress import Progress

    from tpserve.bench.transport.measure import measure

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=plan.blocks * len(plan.arms))
        try:
            return measure(plan, lambda arm: bar.update(task, advance=1, description=arm))
        except KeyboardInterrupt as interrupt:
            raise interrupted(interrupt) from None


def _report(plan: Plan, measured: Measurement, json: Path | None, html: Path | None) -> None:
    from tpserve.bench.terminal import report_console
    from tpserve.bench.transport.report_html import page
    from tpserve.bench.transport.report_terminal import print_report
    from tpserve.bench.transport.summary import summarise

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
