"""The offline engine over real engines: small models, one rank and two."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tpserve import LLM, Completion, SamplingParams
from tpserve.errors import ModelError, TpserveError
from tpserve.messages import ChatPrompt
from tpserve.testing.models import make_model

SETTINGS: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_tokens": 4096, "page_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS: list[str | list[int] | ChatPrompt] = [
    "a",
    [3, 4, 5] * 60,
    ChatPrompt([{"role": "user", "content": "Say something."}]),
    "some words and then some more",
    [7],
]
SAMPLED = SamplingParams(max_tokens=24, seed=11, top_p=0.9)
PARAMS = [GREEDY, GREEDY, SAMPLED, SAMPLED, GREEDY]
PATIENCE = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as llm:
        yield llm


def ranks() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.is_running()]


def told(completions: list[Completion]) -> list[tuple[object, ...]]:
    """What the prompts decide alone, and not what happens to be cached."""
    return [(each.index, each.text, each.token_ids, each.finish_reason, each.prompt_tokens) for each in completions]


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, PARAMS)
    alone = [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert [(c.text, c.token_ids) for c in together] == [(c.text, c.token_ids) for c in alone]
    assert len({tuple(c.token_ids) for c in together}) == len(PROMPTS)


def test_a_stop_string_cuts_the_text(llm: LLM) -> None:
    (whole,) = llm.generate(["a"], GREEDY)
    stop = whole.text[4:6]
    (cut,) = llm.generate(["a"], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(stop,)))
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


def test_two_ranks_give_what_one_gives_and_leave_nothing_behind(model: Path, llm: LLM) -> None:
    before = ranks()
    with LLM(model, tp=2, **SETTINGS) as pair:
        started = [process for process in ranks() if process not in before]
        assert [process.name() for process in started] == ["tpserve: forkserver", "tpserve: rank1"]
        for _ in range(2):
            assert told(pair.generate(PROMPTS, PARAMS)) == told(llm.generate(PROMPTS, PARAMS))
    assert not psutil.wait_procs(started, timeout=PATIENCE)[1]


def test_a_rank_that_dies_ends_the_call_with_its_name(model: Path) -> None:
    before = ranks()
    with LLM(model, tp=2, **SETTINGS) as pair:
        completions = pair.as_completed([[5], [6]], [GREEDY, SamplingParams(max_tokens=900, ignore_eos=True)])
        next(completions)
        for process in ranks():
            if process not in before and process.name() == "tpserve: rank1":
                process.kill()
        with pytest.raises(TpserveError, match="rank1"):
            list(completions)
        with pytest.raises(TpserveError, match="rank1"):
            pair.generate([[5]], GREEDY)
    assert [process for process in ranks() if process not in before] == []


def test_a_process_that_just_ends_takes_its_ranks_along(model: Path) -> None:
    code = f"""
import psutil
from tpserve import LLM, Completion, SamplingParams
llm = LLM({str(model)!r}, tp=2, **{SETTINGS!r})
print(*[child.pid for child in psutil.Process().children(recursive=True)])
llm.generate([[5]], SamplingParams(max_tokens=2))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=5 * PATIENCE, check=False
    )
    assert result.returncode == 0, result.stderr
    pids = [int(pid) for pid in result.stdout.split()]
    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_model_that_cannot_be_split_is_refused_before_anything_starts(model: Path) -> None:
    before = ranks()
    with pytest.raises(ModelError):
        LLM(model, tp=4, **SETTINGS)
    assert ranks() == before


@pytest.mark.parametrize("tp", ["1", "2"])
def test_the_command_completes_a_file(model: Path, llm: LLM, tmp_path: Path, tp: str) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"id": "x", "prompt": "a", "temperature": 0, "max_tokens": 24, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "Say something."}], "seed": 11, "top_p": 0.9, "max_tokens": 24},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = tmp_path / "settings.yaml"
    settings.write_text(json.dumps(SETTINGS))
    command = ["generate", str(source), str(model), "-o", str(output), "--tp", tp, "--config", str(settings)]
    result = subprocess.run(
        [sys.executable, "-m", "tpserve.cli.main", *command],
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in output.read_text().splitlines()]
    expected = llm.generate([PROMPTS[0], PROMPTS[2]], [PARAMS[0], PARAMS[2]])
    assert [(line["index"], line.get("id"), line["text"]) for line in found] == [
        (0, "x", expected[0].text),
        (1, None, expected[1].text),
    ]
