"""What a person sees of a start: the composition with its reasons, the progress of loading, and where to go."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from tpserve.config import ServeConfig
from tpserve.launch import protocol
from tpserve.launch.compose import Composition, Part
from tpserve.launch.plan import Plan
from tpserve.models.config import ModelConfig
from tpserve.step import EngineLimits
from tpserve.version import __version__

__all__ = ["Banner", "Row", "describe"]

Row = tuple[str, str, str]


def describe(plan: Plan) -> list[Row]:
    """What was decided, as rows: what, which, why."""
    model, composition = plan.model, plan.composition
    several = plan.config.tp > 1
    parts: list[tuple[str, Part | None, str]] = [
        ("transport", composition.transport, "one rank needs no fan-out"),
        ("pipes", composition.pipes, "messages stay in this process"),
        ("sync", composition.sync, "one rank announces nothing"),
        ("policy", composition.policy, ""),
        ("attention", composition.attention, ""),
        *([("decode", composition.decode_attention, "")] if composition.decode_attention else []),
        ("ops", composition.ops, ""),
        ("comm", composition.comm, "one rank has nobody to combine with"),
    ]
    return [
        ("model", plan.folder.name, str(plan.folder.path)),
        *([("weights", "random", "load_format is dummy")] if plan.config.load_format == "dummy" else []),
        ("shape", _shape(model), model.architecture),
        ("tp", str(plan.config.tp), _split(composition) if several else "one rank holds the whole model"),
        *((what, part.name, _why(part)) if part else (what, "none", without) for what, part, without in parts),
        ("device", ", ".join(dict.fromkeys(place.device for place in composition.places)), composition.device.reason),
        ("dtype", composition.dtype, composition.dtype_reason),
        *_limits(plan.config, model),
        *_graphs(composition),
        ("step", f"{composition.step_tokens:,} tokens", composition.step_reason),
        ("threads", str(composition.places[0].threads), _cores(composition)),
    ]


def _graphs(composition: Composition) -> list[tuple[str, str, str]]:
    """Whether decode is recorded; nothing where there is no CUDA device, on which it could be."""
    if not any(place.device.startswith("cuda") for place in composition.places):
        return []
    return [("CUDA graphs", "yes" if composition.cuda_graph else "no", composition.cuda_graph_reason)]


class Banner:
    """Shows a start on standard error.

    Args:
        url: where the server can be reached.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._console = Console(file=sys.stderr, highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def composition(self, rows: Sequence[Row]) -> None:
        """Print what the server is made of."""
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        self._console.print(f"tpserve {__version__}")
        for what, which, why in rows:
            line = Text(f"  {what.ljust(widths[0])}  {which.ljust(widths[1])}  ").append(why, style="dim")
            self._console.print(line, soft_wrap=True)

    def progress(self, progress: protocol.Progress) -> None:
        """Move the bar of loading; terminals only."""
        if not self._console.is_terminal:
            return
        if self._bar is None:
            columns = (TextColumn("loading rank 0"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=progress.total)
        assert self._task is not None
        self._bar.update(self._task, completed=progress.done)
        if progress.done >= progress.total:
            self.close()

    def ready(self, limits: EngineLimits, seconds: float) -> None:
        """Say where to go."""
        pool = limits.pages * limits.page_size
        self._console.print(
            f"ready at {self._url} in {seconds:.1f} s (KV pool {pool:,} tokens, context {limits.max_context:,})",
            soft_wrap=True,
        )

    def close(self) -> None:
        """Take the bar off the screen, if there is one. More may be shown later."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _limits(config: ServeConfig, model: ModelConfig) -> list[Row]:
    """What becomes of limits that cannot be met as they were asked for."""
    rows = []
    if config.max_context > model.max_context:
        rows.append(("context", f"{model.max_context:,} tokens", f"the model's limit, below {config.max_context:,}"))
    if config.kv_tokens % config.page_size:
        tokens = -(-config.kv_tokens // config.page_size) * config.page_size
        rows.append(("KV pool", f"{tokens:,} tokens", f"{config.kv_tokens:,} in whole pages of {config.page_size}"))
    return rows


def _why(part: Part) -> str:
    options = ", ".join(f"{name}={value}" for name, value in part.options.items())
    return f"{part.reason} ({part.provider})" + (f" with {options}" if options else "")


def _shape(model: ModelConfig) -> str:
    return (
        f"{model.layers} layer{'' if model.layers == 1 else 's'}, hidden {model.hidden}, "
        f"{model.q_heads} query and {model.kv_heads} KV heads of {model.head_dim}"
    )


def _split(composition: Composition) -> str:
    q_heads = "+".join(str(partition.q_heads.size) for partition in composition.partitions)
    kv_heads = "+".join(str(partition.kv_heads.size) for partition in composition.partitions)
    return f"{q_heads} query heads, {kv_heads} KV heads"


def _cores(composition: Composition) -> str:
    if not any(place.cpus for place in composition.places):
        return "a rank, on any core"
    return "a rank, on cores " + "; ".join(",".join(map(str, place.cpus)) for place in composition.places)
