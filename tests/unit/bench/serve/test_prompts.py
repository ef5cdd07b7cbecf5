from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tpserve.bench.serve.prompts import Prompt, Prompts, Workload, request
from tpserve.errors import ConfigError


def draw(workload: Workload, random: Random) -> list[Prompt]:
    return Prompts(workload).draw(workload.num_prompts, random)


def test_random_prompts_are_ids_of_the_length_asked_for_and_a_function_of_the_seed() -> None:
    workload = Workload(num_prompts=50, input_len=30, output_len=7, vocab_size=120)
    prompts = draw(workload, Random(1))

    assert [(len(prompt.content), prompt.max_tokens) for prompt in prompts] == [(30, 7)] * 50
    assert {token for prompt in prompts for token in prompt.content} == set(range(100, 120))
    assert prompts == draw(workload, Random(1)) != draw(workload, Random(2))


def test_lengths_vary_evenly_within_their_range() -> None:
    workload = Workload(num_prompts=500, input_len=10, output_len=20, range_ratio=0.5)
    prompts = draw(workload, Random(1))

    assert {len(prompt.content) for prompt in prompts} == set(range(5, 16))
    assert {prompt.max_tokens for prompt in prompts} == set(range(10, 31))


def conversations(folder: Path, *talks: tuple[int, ...]) -> str:
    """A file of conversations whose turns have so many characters."""
    made: Any = [{"conversations": [{"from": "human", "value": "x" * size} for size in talk]} for talk in talks]
    (folder / "talks.json").write_bytes(msgspec.json.encode([*made, {"id": "empty"}]))
    return str(folder / "talks.json")


def test_conversations_of_a_useful_length_are_drawn(tmp_path: Path) -> None:
    path = conversations(tmp_path, (40, 80), (44, 84, 9), (40,), (8, 80), (40, 8), (8000, 80), (4000, 6000))
    workload = Workload(dataset="sharegpt", dataset_path=path, num_prompts=2, output_len=None)
    prompts = draw(workload, Random(1))

    assert sorted((prompt.content, prompt.max_tokens) for prompt in prompts) == [("x" * 40, 20), ("x" * 44, 21)]
    workload = msgspec.structs.replace(workload, output_len=1)
    assert [prompt.max_tokens for prompt in draw(workload, Random(1))] == [1, 1]


def test_what_length_is_useful_is_told_where_there_is_none(tmp_path: Path) -> None:
    path = conversations(tmp_path, (8, 80), (40, 8))
    with pytest.raises(ConfigError, match="has 0 conversations of a useful length, fewer than --num-prompts 3") as told:
        draw(Workload(dataset="sharegpt", dataset_path=path, num_prompts=3), Random(1))

    for number in ("4 tokens or more", "1024 at most", "2048 with", "4 characters"):
        assert number in told.value.hint


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "has 0 conversations"),
        ("{}", "not in ShareGPT's format"),
        ('[{"more": ' + 5000 * "[" + 5000 * "]" + "}]", "not in ShareGPT's format: nested too deep"),
    ],
)
def test_a_file_that_does_not_do_is_told(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "talks.json"
    with pytest.raises(ConfigError, match="No such file"):
        draw(Workload(dataset="sharegpt", dataset_path=str(path)), Random(1))
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        draw(Workload(dataset="sharegpt", dataset_path=str(path)), Random(1))


def test_a_request_is_greedy_and_goes_to_the_backend_s_path() -> None:
    [prompt] = draw(Workload(num_prompts=1, input_len=2), Random(1))

    path, body = request(Workload(), prompt, "m")
    settings = {"model": "m", "max_tokens": 64, "temperature": 0}
    assert (path, body) == ("/v1/completions", {**settings, "ignore_eos": True, "prompt": prompt.content})
    path, body = request(Workload(backend="openai-chat", ignore_eos=False), prompt, "m")
    assert (path, body) == (
        "/v1/chat/completions",
        {**settings, "messages": [{"role": "user", "content": prompt.content}]},
    )
