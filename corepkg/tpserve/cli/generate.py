"""``tpserve generate``: complete the prompts of a file, without a server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Self

import msgspec
import typer
from msgspec.structs import asdict

from tpserve.api.specs import KINDS
from tpserve.cli.common import check_model, command_app, file_path, sampling_fields
from tpserve.config import ServeConfig
from tpserve.errors import ConfigError
from tpserve.messages import ChatPrompt, SamplingParams
from tpserve.outputs import check_apart, check_output, inputs, outputs
from tpserve.settings import load_settings
from tpserve.values import is_text, read_json

if TYPE_CHECKING:
    from rich.progress import TaskID

    from tpserve.offline import Completion

__all__ = ["Line", "app", "read_lines"]

app = command_app()

LONE = "the text has a lone surrogate, which is no character"

HINT = 'Each line is {"prompt": …}, {"prompt_ids": […]} or {"messages": […]}, with "id" and sampling fields as wanted'

Filled = msgspec.Meta(min_length=1)


class Line(msgspec.Struct, frozen=True):
    """One prompt of a file.

    Attributes:
        number: of the line, from 1.
        id: what the line calls itself, or None.
        prompt: text, token ids or a conversation.
        params: how it is sampled.
    """

    number: int
    id: str | int | None
    prompt: str | list[int] | ChatPrompt
    params: SamplingParams


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a line may say besides how to sample."""

    id: str | int | None = None
    prompt: Annotated[str, Filled] | None = None
    prompt_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], Filled] | None = None
    messages: Annotated[list[dict[str, Any]], Filled] | None = None


class _Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the output."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    id: str | int | None = None


@app.command()
def generate(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A JSON Lines file with one prompt a line.", parser=file_path)
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a .gguf file or a hub id; the embedded model if left out.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            help="Where to write.",
            show_default="standard output",
            parser=file_path,
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="For lines that do not say.")] = None,
    temperature: Annotated[float | None, typer.Option(help="For lines that do not say.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that share the model.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads a rank on the CPU.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KIND.KEY=VALUE", help="Set a plugin's option.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A YAML file with any settings.", parser=file_path)
    ] = None,
) -> None:
    """Complete the prompts of a file, without a server.

    Each line of INPUT is a JSON object with a "prompt", "prompt_ids" or "messages", and as wanted an "id" and the
    sampling fields max_tokens, temperature, top_p, top_k, min_p, stop, seed and ignore_eos. The output has a line
    for each, in the same order.
    """
    check_model(model)
    _check_output(output)
    lines = read_lines(source, sampling_fields(max_tokens=max_tokens, temperature=temperature))
    given = {"model": model, "tp": tp, "device": device, "dtype": dtype, "threads": threads}
    settings = load_settings(given, option or [], config, os.environ)
    read = [("the input file", source), ("the file of --config", config), *inputs(settings)]
    check_apart([("--output", output), *outputs(settings)], read)
    with _Bars(results_are_elsewhere=output is not None or not sys.stdout.isatty()) as bars:
        _complete(source, lines, settings, output, bars)


def read_lines(path: Path, defaults: dict[str, Any]) -> list[Line]:
    """Read and check a file of prompts; blank lines are passed over.

    Args:
        path: the file.
        defaults: sampling fields for lines that do not have them.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; the message names file and line.
    """
    try:
        texts = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    lines = [_read_line(path, number, text, defaults) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise ConfigError(f"{path} has no prompts", HINT)
    return lines


def _read_line(path: Path, number: int, text: bytes, defaults: dict[str, Any]) -> Line:
    try:
        content = _decode(text)
        own = {name: content.pop(name) for name in SamplingParams.__struct_fields__ if name in content}
        params = defaults | own
        if isinstance(params.get("stop"), str):
            params["stop"] = [params["stop"]]
        fields = msgspec.convert(content, _Fields)
        return Line(number, fields.id, _prompt(fields), msgspec.convert(params, SamplingParams))
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{path}, line {number}: {error}", HINT) from None


def _decode(text: bytes) -> dict[str, Any]:
    try:
        return read_json(text, dict[str, Any])
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        raise ValueError(LONE if _has_lone_surrogate(text) else f"not JSON: {error}") from None


def _has_lone_surrogate(text: bytes) -> bool:
    """Whether that is what is wrong: JSON can write half a pair, and it is no character."""
    try:
        return not is_text(json.dumps(json.loads(text), ensure_ascii=False))
    except (ValueError, RecursionError):
        return False


def _prompt(fields: _Fields) -> str | list[int] | ChatPrompt:
    messages = None if fields.messages is None else ChatPrompt(fields.messages)
    given = [prompt for prompt in (fields.prompt, fields.prompt_ids, messages) if prompt is not None]
    if len(given) != 1:
        raise ValueError(f"expected one of prompt, prompt_ids and messages, found {len(given)}")
    return given[0]


def _check_output(output: Path | None) -> None:
    if output is None:
        return
    if "=" in output.name and output.name.partition(".")[0] in KINDS:
        raise ConfigError(f"-o {output}: -o says where to write", f"Set a plugin's option with --option {output}")
    check_output(output)


def _complete(source: Path, lines: list[Line], settings: ServeConfig, output: Path | None, bars: _Bars) -> None:
    from tpserve.launch.logging import set_up_logging
    from tpserve.offline import LLM, PromptError

    set_up_logging("generate", settings.log_level)
    with LLM(**asdict(settings), loading=bars.loading) as llm:
        try:
            completions = llm.as_completed([line.prompt for line in lines], [line.params for line in lines])
        except PromptError as error:
            line = lines[error.index].number
            raise ConfigError(f"{source}, line {line}: {error.message}") from None
        with _opened(output) as file:
            for completion in _in_order(bars.count(completions, len(lines))):
                _write(file, _result(completion, lines[completion.index].id), output)


def _in_order(completions: Iterable[Completion]) -> Iterator[Completion]:
    """Hold completions back until those of all earlier lines have come."""
    held: dict[int, Completion] = {}
    due = 0
    for completion in completions:
        held[completion.index] = completion
        while due in held:
            yield held.pop(due)
            due += 1


def _result(completion: Completion, id: str | int | None) -> bytes:
    result = _Result(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        prompt_tokens=completion.prompt_tokens,
        id=id,
    )
    return msgspec.json.encode(result) + b"\n"


def _write(file: IO[bytes], line: bytes, output: Path | None) -> None:
    try:
        file.write(line)
        file.flush()
    except OSError as error:
        if output is None:
            raise
        # What is still buffered would fail once more when the file is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[bytes]]:
    if output is None:
        yield sys.stdout.buffer
        return
    try:
        file = output.open("wb")
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from None
    with file:
        yield file


class _Bars:
    """Progress bars, if standard error is a terminal that does not show the results as well."""

    def __init__(self, results_are_elsewhere: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(
            *columns, console=console, disable=not (console.is_terminal and results_are_elsewhere)
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def loading(self, done: int, total: int) -> None:
        """So many bytes of weights are loaded."""
        self._show("loading", done, total)

    def count(self, completions: Iterable[Completion], total: int) -> Iterator[Completion]:
        """Pass completions on and count them."""
        self._show("completing", 0, total)
        for done, completion in enumerate(completions, 1):
            self._show("completing", done, total)
            yield completion

    def _show(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what)
        self._progress.update(self._tasks[what], completed=done, total=total)
