"""Runs on a small model: what is counted, what repeats share, and what an arm's settings do."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tpserve.bench.offline import LONGEST, WORKLOADS, Arm, Plan, Report, Run, _is_at_once, measure
from tpserve.bench.shapes import SHAPES, write_shape
from tpserve.bench.workload import Workload, fixed, shared_prefix
from tpserve.cli.bench import app
from tpserve.errors import ConfigError
from tpserve.models.config import ModelConfig
from tpserve.offline.llm import LLM
from tpserve.step import EngineLimits
from tpserve.testing.models import make_model

SMALL = {"dtype": "float32", "threads": 1, "kv_tokens": 4096}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(autouse=True)
def small_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "fixed", lambda n, seed, vocab: Workload(fixed(n, 20, seed, vocab), [5] * n))
    monkeypatch.setitem(LONGEST, "fixed", (20, 5))
    monkeypatch.setitem(WORKLOADS, "shared", lambda n, seed, vocab: shared_prefix(n, 2, 32, 4, 3, seed, vocab))
    monkeypatch.setitem(LONGEST, "shared", (36, 3))


def test_two_arms_take_turns_on_the_same_prompts(model: Path) -> None:
    order: list[tuple[str, int]] = []
    arms = {"a": {**SMALL, "cache": "none"}, "b": {**SMALL, "cache": "radix"}}
    plan = Plan(str(model), "shared", 8, repeats=2, seed=3)
    report = measure(plan, arms, lambda arm, repeat, run: order.append((arm, repeat)))
    assert [repeat for _, repeat in order] == [-1, -1, 0, 0, 1, 1]
    assert {tuple(sorted(arm for arm, at in order if at == repeat)) for repeat in (-1, 0, 1)} == {("a", "b")}
    assert [(run.prompt_tokens, run.output_tokens) for arm in report.arms.values() for run in arm.runs] == [
        (288, 24)
    ] * 4
    assert [run.cached_tokens for run in report.arms["a"].runs] == [0, 0]
    assert [run.cached_tokens for run in report.arms["b"].runs] == [192, 192]
    assert report.ratios.keys() == {"b"}
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_a_repeat_finds_nothing_of_the_one_before_and_tells_what_a_step_takes(model: Path) -> None:
    report = measure(Plan(str(model), "fixed", 3, repeats=2, seed=0), {"a": SMALL})
    arm = report.arms["a"]
    assert isinstance(arm, Arm)
    assert not report.ratios
    for run in arm.runs:
        assert (run.prompt_tokens, run.cached_tokens, run.output_tokens) == (60, 0, 15)
        assert run.first_seconds is not None
        assert run.tpot == pytest.approx((run.seconds - run.first_seconds) / 4)
    assert arm.tokens_per_second == pytest.approx(sum(15 / run.seconds for run in arm.runs) / 2)


def of_a_second_a_token(llm: LLM, work: Workload) -> Run:
    return Run(float(sum(work.outputs)), sum(map(len, work.prompts)), 0, sum(work.outputs))


def test_the_warm_up_takes_first_tokens_of_as_many_requests(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpserve.bench.offline._run", of_a_second_a_token)
    told: list[tuple[int, float | None, float | None]] = []
    measure(
        Plan(str(model), "fixed", 10, repeats=1, seed=0),
        {"a": SMALL},
        lambda arm, repeat, run: told.append((repeat, run.first_seconds, run.tpot)),
    )
    assert told == [(-1, 8, 8), (0, 10, 10)]


def test_no_two_runs_share_a_prompt_and_arms_take_turns_in_another_order(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def note(llm: LLM, work: Workload) -> Run:
        asked.extend(map(tuple, work.prompts))
        return of_a_second_a_token(llm, work)

    monkeypatch.setattr("tpserve.bench.offline._run", note)
    order: list[str] = []
    plan = Plan(str(model), "fixed", 2, repeats=7, seed=0)
    measure(plan, {"a": SMALL, "b": SMALL}, lambda arm, *_: order.append(arm))
    assert len(asked) == 2 * len(set(asked)) == 2 * 8 * 2 * 2
    assert {tuple(order[turn : turn + 2]) for turn in range(0, 16, 2)} == {("a", "b"), ("b", "a")}


def test_requests_that_wait_for_others_do_not_tell_what_a_step_takes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpserve.bench.offline._run", of_a_second_a_token)
    arms = {"a": SMALL, "b": SMALL | {"max_running_requests": 2}}
    report = measure(Plan(str(model), "fixed", 3, repeats=1, seed=0), arms)
    assert [(run.first_seconds, run.tpot) for arm in report.arms.values() for run in arm.runs] == [(3, 3), (None, None)]


@pytest.mark.parametrize(
    ("pages", "slots", "step_tokens", "at_once"),
    [(6, 3, 3, True), (5, 3, 3, False), (6, 2, 3, False), (6, 3, 2, False)],
)
def test_what_runs_at_once(pages: int, slots: int, step_tokens: int, at_once: bool) -> None:
    limits = EngineLimits(pages, page_size=16, slots=slots, max_context=99, vocab_size=320, eos_ids=())
    assert _is_at_once(Workload([[1] * 20] * 3, [5] * 3), limits, step_tokens) is at_once


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("requests", [1, 7, 9, 20])
def test_a_workload_has_as_many_requests_as_are_asked_for(
    name: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    work = WORKLOADS[name](requests, 0, 319)
    assert len(work.prompts) == len(work.outputs) == requests
    longest = max(map(len, work.prompts)), max(work.outputs)
    if name == "mixed":
        assert longest <= LONGEST[name]
    else:
        assert longest == LONGEST[name]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_tokens": 16}, "the prompt has 20 tokens; the KV pool holds 16"),
        ({"kv_tokens": 0, "max_context": 24}, "20 tokens of prompt and 5 of output exceed the context of 24"),
    ],
)
def test_a_workload_that_does_not_fit_is_refused_before_anything_is_loaded(
    model: Path, wrong: dict[str, int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpserve.bench.offline.LLM", None)
    with pytest.raises(ConfigError, match=f"^workload fixed does not fit into arm b: {says}"):
        measure(Plan(str(model), "fixed", 2, repeats=1, seed=0), {"a": SMALL, "b": SMALL | wrong})


def test_a_pool_has_whole_pages(model: Path) -> None:
    measure(Plan(str(model), "fixed", 1, repeats=1, seed=0), {"a": SMALL | {"kv_tokens": 26}})  # of 20 and 5: 32


def test_a_pool_that_turns_out_too_small_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpserve.engine.build.page_count", lambda *_: 1)
    with pytest.raises(ConfigError, match="does not fit into arm a: the prompt has 20 tokens; the KV pool holds 16"):
        measure(Plan(str(model), "fixed", 2, repeats=1, seed=0), {"a": SMALL | {"kv_tokens": 0}})


@pytest.mark.parametrize("setting", ["profile", "record"])
def test_arms_do_not_write_to_one_place(setting: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpserve.bench.offline.LLM", None)
    arm = SMALL | {setting: "place"}
    says = f"^arm a's {setting} and arm b's {setting} would both write place.*. Give each a file of its own"
    with pytest.raises(ConfigError, match=says):
        measure(Plan(str(model), "fixed", 2, repeats=1, seed=0), {"a": arm, "b": arm})


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ({"profile": "x"}, {"record": "x/rank0.json"}, "arm a's profile and arm b's record would both write x/rank0"),
        ({"profile": "x"}, {"record": "x"}, "arm b's record would write .*x, and arm a's profile in it"),
        ({"record": "x"}, {"record": "x/y"}, "arm a's record would write .*x, and arm b's record in it"),
        ({"profile": "report.json"}, {}, "the report would write .*report.json, and arm a's profile in it"),
        ({}, {"record": "report.json"}, "the report and arm b's record would both write report.json"),
        (
            {"record": "m/config.json"},
            {"model": "m"},
            "arm a's record would overwrite .*/config.json, read as arm .'s model",
        ),
        ({}, {"record": "no/x"}, "no/x: there is no folder"),
        ({}, {"profile": "m/config.json"}, "no traces can be written in m/config.json: Not a directory"),
    ],
)
def test_what_an_arm_writes_is_no_others_and_known_to_be_possible_before_anything_is_loaded(
    a: dict[str, str], b: dict[str, str], says: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpserve.bench.offline.LLM", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").symlink_to(model)
    plan = Plan(str(model), "fixed", 2, repeats=1, seed=0)
    with pytest.raises(ConfigError, match=f"^{says}"):
        measure(plan, {"a": SMALL | a, "b": SMALL | b}, report=Path("report.json"))


def test_an_arm_may_have_a_model_of_its_own(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_model(tmp_path / "other", "qwen3")
    loaded: list[str] = []

    def load(model: str, **settings: Any) -> LLM:
        loaded.append(model)
        return LLM(model, **settings)

    monkeypatch.setattr("tpserve.bench.offline.LLM", load)
    arms = {"a": SMALL, "b": SMALL | {"model": str(other)}}
    report = measure(Plan(str(model), "fixed", 1, repeats=1, seed=0), arms)
    assert [report.arms[name].made_of["model"] for name in "ab"] == ["llama", "other"]
    assert loaded == [str(model), str(other)]


def test_the_command_writes_json(model: Path, tmp_path: Path) -> None:
    words = ["offline", *(f"{name}={value}" for name, value in SMALL.items())]
    flags = ["--model", str(model), "--requests", "2", "--repeats", "1", "--b", "overlap=false,page-size=4"]
    done = CliRunner().invoke(app, [*words, *flags, "--json", str(tmp_path / "out.json")], catch_exceptions=False)
    assert done.exit_code == 0
    report = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Report)
    assert report.arms["b"].settings == {**{k: str(v) for k, v in SMALL.items()}, "overlap": "false", "page_size": "4"}
    assert report.ratios == {"b": None}
    assert "b, run 1: " in done.stderr


def test_a_shape_needs_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny |= {"head_dim": 16, "intermediate_size": 64, "vocab_size": 512}
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", SHAPES["qwen3-0.6b"] | tiny)
    words = ["offline", *(f"{name}={value}" for name, value in SMALL.items()), "--shape", "qwen3-0.6b"]
    done = CliRunner().invoke(app, [*words, "--workload", "stream", "--repeats", "1"], catch_exceptions=False)
    report = msgspec.json.decode(done.stdout, type=Report)
    assert [run.output_tokens for run in report.arms["a"].runs] == [256]
    assert report.arms["a"].settings["load_format"] == "dummy"
    assert report.arms["a"].start_seconds > 0
    assert report.plan.model == "--shape qwen3-0.6b"
    assert report.arms["a"].made_of["model"] == "qwen3-0.6b"
    assert report.arms["a"].made_of["attention"] in ("cpu", "torch")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--shape", "qwen3-0.6b", "--model", "x"], "--shape and --model"),
        (["--shape", "qwen3-0.6b", "model=x"], "--shape and model="),
        (["--shape", "qwen3-0.6b", "--a", "tp=2", "--b", "model=x"], "--shape and model="),
        (["--model", "x", "model=y"], "--model and model="),
        (["--model", "x", "--a", "model=y"], "--model and model="),
        (["--model", "x", "--a", "model=y", "--b", "tp=2,model=z"], "--model and model="),
    ],
)
def test_a_model_is_named_once(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} name a model each"):
        CliRunner().invoke(app, ["offline", *words], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "models", "planned"),
    [
        (["model=x", "--b", "tp=2"], ["x", "x"], "x"),
        (["model=x", "--b", "model=y"], ["x", "y"], "x"),
        (["--model", "x", "--b", "model=y"], [None, "y"], "x"),
        (["--a", "model=x", "--b", "model=y"], ["x", "y"], ""),
    ],
)
def test_arms_may_differ_in_their_model(
    words: list[str], models: list[str | None], planned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, arms = given_to_measure(words, monkeypatch)
    assert (plan.model, [arms[name].get("model") for name in "ab"]) == (planned, models)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("attn=cpu,torch", {"attn": "cpu,torch"}),
        ("tp=2,attn=cpu,torch,page-size=4", {"tp": "2", "attn": "cpu,torch", "page_size": "4"}),
        (",tp=2,", {"tp": "2"}),
        ("tp=2,,cache=none", {"tp": "2", "cache": "none"}),
        ("", {}),
    ],
)
def test_a_setting_of_an_arm_may_have_commas(
    text: str, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert given_to_measure(["--a", text], monkeypatch)[1] == {"a": settings}


class Measured(Exception):
    """In the place of a measurement."""


def given_to_measure(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, dict[str, dict[str, str]]]:
    def stop(*given: object) -> None:
        raise Measured(*given[:2])

    monkeypatch.setattr("tpserve.bench.offline.measure", stop)
    with pytest.raises(Measured) as measured:
        CliRunner().invoke(app, ["offline", *words], catch_exceptions=False)
    plan, arms = measured.value.args
    return plan, arms


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_understood(name: str, tmp_path: Path) -> None:
    model = ModelConfig.from_folder(write_shape(name, tmp_path / name))
    assert (model.kv_heads, model.head_dim, model.dtype) == (8, 128, "bfloat16")


@pytest.mark.parametrize("words", [["cache"], ["--a", "=3"], ["--b", "nonsense,cache=radix"]])
def test_what_is_no_setting_is_named(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^(cache|=3|nonsense): no setting"):
        CliRunner().invoke(app, ["offline", *words], catch_exceptions=False)


def test_tokens_a_second_are_of_the_output() -> None:
    assert Run(2.0, 100, 0, 30).tokens_per_second == 15
