"""``tpserve generate``: what lines may say, what is refused before anything loads, and the order of the output."""

import json

import pytest
from typer.testing import CliRunner

import tpserve.offline
from tpserve.cli.generate import app, read_lines
from tpserve.errors import ConfigError, RequestError
from tpserve.messages import ChatPrompt, SamplingParams
from tpserve.offline import Completion, PromptError


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "in.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


class FakeLLM:
    """Finishes the last prompt first."""

    made: list[dict]

    def __init__(self, **settings):
        self.made.append(settings)
        settings["loading"](1, 2)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.made.append("closed")

    def as_completed(self, prompts, params):
        if "too long" in prompts:
            raise PromptError(prompts.index("too long"), RequestError("the prompt has too many tokens", "prompt"))
        return (
            Completion(index, f"{prompts[index]}!", [index], "stop", prompt_tokens=7, cached_tokens=0)
            for index in reversed(range(len(prompts)))
        )


@pytest.fixture
def made(monkeypatch):
    FakeLLM.made = []
    monkeypatch.setattr(tpserve.offline, "LLM", FakeLLM)
    return FakeLLM.made


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)


def test_every_kind_of_line(write):
    path = write(
        {"prompt": "a", "id": "first"},
        "",
        {"prompt_ids": [1, 2], "stop": "x", "max_tokens": 3, "temperature": 0, "seed": 5, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "hi"}], "stop": ["x", "y"], "top_k": 4, "top_p": 0.5, "min_p": 0.1},
    )
    lines = read_lines(path, {"max_tokens": 9})
    assert [(line.number, line.id) for line in lines] == [(1, "first"), (3, None), (4, None)]
    assert [line.prompt for line in lines] == ["a", [1, 2], ChatPrompt([{"role": "user", "content": "hi"}])]
    assert [line.params for line in lines] == [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=3, temperature=0.0, stop=("x",), seed=5, ignore_eos=True),
        SamplingParams(max_tokens=9, stop=("x", "y"), top_k=4, top_p=0.5, min_p=0.1),
    ]


def test_a_text_may_hold_any_character(write):
    path = write('{"prompt": "line\u2028separator \\u2028 \\n and \\ud83d\\ude00"}')
    assert [line.prompt for line in read_lines(path, {})] == ["line\u2028separator \u2028 \n and 😀"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "JSON"),
        ("[1]", "Expected `object`"),
        ('{"prompt": "\\ud800"}', "the text has a lone surrogate, which is no character"),
        ({}, "expected one of prompt, prompt_ids and messages, found 0"),
        ({"prompt": "a", "prompt_ids": [1]}, "expected one of prompt, prompt_ids and messages, found 2"),
        ({"prompt": ""}, "length >= 1 - at `$.prompt`"),
        ({"prompt_ids": []}, "length >= 1 - at `$.prompt_ids`"),
        ({"prompt_ids": [1, -1]}, "`$.prompt_ids[1]`"),
        ({"messages": ["hi"]}, "`$.messages[0]`"),
        ({"prompt": "a", "max_token": 5}, "unknown field `max_token`"),
        ({"prompt": "a", "max_tokens": 0}, "`int` >= 1 - at `$.max_tokens`"),
        ({"prompt": "a", "temperature": "hot"}, "Expected `float`, got `str` - at `$.temperature`"),
        ({"prompt": "a", "id": [1]}, "`$.id`"),
    ],
)
def test_a_bad_line_is_named_before_anything_loads(write, made, tmp_path, line, message):
    path = write({"prompt": "fine"}, line)
    result = run(path, "-o", tmp_path / "out.jsonl")
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message.startswith(f"{path}, line 2: ")
    assert message in result.exception.message
    assert "prompt_ids" in result.exception.hint
    assert made == []
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_cannot_be_used(write, made, tmp_path):
    path = write({"prompt": "a"})
    (tmp_path / "latin").write_bytes(b'{"prompt": "e"}\n{"prompt": "\xe9"}')
    (tmp_path / "m.gguf").touch()
    (tmp_path / "c").write_text(f"record: {tmp_path / 'r'}")
    (tmp_path / "deep").write_text('{"id": ' + 5000 * "[" + 5000 * "]" + "}")
    for arguments, message in [
        ([tmp_path / "none.jsonl"], "none.jsonl cannot be read: .*No such file"),
        ([tmp_path / "latin"], "latin, line 2: not JSON: Invalid UTF-8"),
        ([tmp_path / "deep"], "deep, line 1: not JSON: nested too deep"),
        ([path, "-o", path], "--output would overwrite .*, read as the input file"),
        ([path, tmp_path / "m.gguf", "-o", tmp_path / "m.gguf"], "--output would overwrite .*m.gguf, read as model"),
        (
            [path, "--config", tmp_path / "c", "-o", tmp_path / "c"],
            "--output would overwrite .*c, read as the file of --config",
        ),
        ([path, "--config", tmp_path / "c", "-o", tmp_path / "r"], "--output and record would both write .*r"),
        ([path, "-o", tmp_path], "is a folder"),
        ([path, "-o", tmp_path / "no" / "out"], "there is no folder"),
        ([path, "--tp", "0"], "--tp"),
        ([path, "--temperature", "nan"], "--temperature: expected a number from 0 to 2, found nan"),
        ([path, "--max-tokens", "0"], "--max-tokens: expected an integer from 1 to 2147483647, found 0"),
    ]:
        result = run(*arguments)
        assert isinstance(result.exception, ConfigError)
        assert pytest.raises(ConfigError, match=message).matches(result.exception)
    with pytest.raises(ConfigError, match="has no prompts"):
        read_lines(write("", " "), {})
    assert made == []


def test_the_output_keeps_the_order_of_the_input(write, made, tmp_path):
    path = write({"prompt": "a", "id": 17}, {"prompt": "é"}, "", {"prompt": "c", "id": "x"})
    output = tmp_path / "out.jsonl"
    result = run(path, "some/model", "-o", output, "--tp", "2", "--option", "policy.fcfs.reserve=1")
    assert result.exit_code == 0, result.exception
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"index": 0, "text": "a!", "token_ids": [0], "finish_reason": "stop", "prompt_tokens": 7, "id": 17},
        {"index": 1, "text": "é!", "token_ids": [1], "finish_reason": "stop", "prompt_tokens": 7},
        {"index": 2, "text": "c!", "token_ids": [2], "finish_reason": "stop", "prompt_tokens": 7, "id": "x"},
    ]
    settings, closed = made
    assert (settings["model"], settings["tp"], settings["options"]) == (
        "some/model",
        2,
        {"policy.fcfs": {"reserve": "1"}},
    )
    assert closed == "closed"


def test_standard_output_holds_nothing_but_results(write, made):
    result = run(write({"prompt": "a"}, {"prompt": "b"}))
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["a!", "b!"]


def test_a_prompt_that_does_not_fit_is_named_by_its_line(write, made, tmp_path):
    path = write({"prompt": "a"}, "", {"prompt": "too long"})
    output = tmp_path / "out.jsonl"
    output.write_text("of an earlier run")
    result = run(path, "-o", output)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message == f"{path}, line 3: the prompt has too many tokens"
    assert output.read_text() == "of an earlier run"
    assert made[-1] == "closed"


def test_a_plugin_option_is_not_taken_for_a_file(write):
    refused = run(write({"prompt": "a"}), "-o", "policy.reserve=1").exception
    assert isinstance(refused, ConfigError)
    assert refused.hint == "Set a plugin's option with --option policy.reserve=1"


def test_a_full_disk_is_one_line(write, made):
    refused = run(write({"prompt": "a"}), "-o", "/dev/full").exception
    assert isinstance(refused, ConfigError)
    assert refused.message == "/dev/full cannot be written: No space left on device"


def test_a_missing_file_is_one_line(tmp_path):
    refused = run(tmp_path / "none.jsonl").exception
    assert isinstance(refused, ConfigError)
    assert refused.message == f"{tmp_path}/none.jsonl cannot be read: No such file or directory"
