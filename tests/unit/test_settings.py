"""Settings come from four places in a fixed order, and every mistake names its place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tpserve.config import ServeConfig
from tpserve.errors import ConfigError
from tpserve.plugins.registry import Registry
from tpserve.settings import flag_name, kind_flag, load_settings, plugin_options, unknown_variables


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str) -> Path:
        file = tmp_path / "server.yaml"
        file.write_text(text)
        return file

    return write_file


@pytest.fixture
def made_up_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that no plugin has pass."""
    monkeypatch.setattr(Registry, "check_option", lambda *_: None)


def load(
    cli: dict[str, Any] | None = None,
    flags: list[str] | None = None,
    file: Path | None = None,
    environ: dict[str, str] | None = None,
) -> ServeConfig:
    return load_settings(cli or {}, flags or [], file, environ or {})


def refusal(**sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**sources)
    return str(caught.value)


def test_without_any_source_the_defaults_hold() -> None:
    assert load() == ServeConfig()


def test_each_source_gives_way_to_the_one_before(write: Any) -> None:
    file = write("port: 1\ntp: 2\nmax-running-requests: 3\nsync: gloo\n")
    environ = {"TPSERVE_PORT": "10", "TPSERVE_TP": "20"}

    config = load(cli={"port": 100, "tp": None, "policy": "fcfs"}, file=file, environ=environ)

    assert (config.port, config.tp, config.max_running_requests, config.sync) == (100, 20, 3, "gloo")


def test_text_of_the_environment_becomes_the_type() -> None:
    config = load(environ={"TPSERVE_HEARTBEAT": "2.5", "TPSERVE_TP": "3", "TPSERVE_MODEL": "7"})

    assert (config.heartbeat, config.tp, config.model) == (2.5, 3, "7")


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({"cli": {"port": 70000}}, "--port: expected an integer from 0 to 65535, found 70000"),
        ({"cli": {"max_running_requests": 0}}, "--max-running-requests: expected an integer from 1 to 65536, found 0"),
        ({"cli": {"memory_fraction": 1.5}}, "--memory-fraction: expected a number above 0 to 1, found 1.5"),
        ({"environ": {"TPSERVE_PORT": "http"}}, "TPSERVE_PORT: expected an integer from 0 to 65535, found 'http'"),
        ({"environ": {"TPSERVE_PAGE_SIZE": "512"}}, "TPSERVE_PAGE_SIZE: expected an integer from 1 to 256"),
        ({"environ": {"TPSERVE_DEVICE": "tpu"}}, "TPSERVE_DEVICE: expected one of auto, cpu, cuda, found 'tpu'"),
        (
            {"environ": {"TPSERVE_WATCHDOG": "nan"}},
            "TPSERVE_WATCHDOG: expected a number from 1 to 1000000, found 'nan'",
        ),
        ({"cli": {"watchdog": 1e20}}, "--watchdog: expected a number from 1 to 1000000, found 1e+20"),
        ({"cli": {"heartbeat": 1e-7}}, "--heartbeat: expected a number from 0.01 to 1000000, found 1e-07"),
        ({"cli": {"startup_timeout": 1e20}}, "--startup-timeout: expected a number above 0 to 1000000, found 1e+20"),
        ({"cli": {"drain_timeout": math.inf}}, "--drain-timeout: expected a number from 0 to 1000000, found inf"),
        ({"cli": {"threads": 100000}}, "--threads: expected an integer from 0 to 1024, found 100000"),
        ({"cli": {"options": 3}}, "--options: expected a mapping, found 3"),
        ({"cli": {"options": {3: 4}}}, "--options: 3: there is no kind '3'"),
        ({"cli": {"heartbeat": 30.0}}, "heartbeat is 30 s and watchdog 30 s. An idle leader must"),
        ({"flags": ["transport.send_buffer"]}, "-o transport.send_buffer: no value. Write -o kind.field=value"),
        ({"flags": ["transprot.x=1"]}, "-o transprot.x=1: there is no kind 'transprot'. Did you mean 'transport'?"),
        ({"flags": ["transport=1"]}, "-o transport=1: 'transport' names no option. Write kind.field"),
        ({"flags": ["transport.a.b.c=1"]}, "-o transport.a.b.c=1: 'transport.a.b.c' names no option"),
        ({"flags": ["transport..x=1"]}, "-o transport..x=1: 'transport..x' names no option"),
    ],
)
def test_a_mistake_names_source_and_key(sources: dict[str, Any], says: str) -> None:
    assert refusal(**sources).startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port: -1", "server.yaml: port: expected an integer from 0 to 65535, found -1"),
        (
            "max-runing-requests: 3",
            "server.yaml: max_runing_requests: there is no such setting. Did you mean 'max_running_requests'?",
        ),
        ("- port", "server.yaml: expected a mapping of settings, found list"),
        ("port: [", "server.yaml: not valid YAML: while parsing"),
        ("drain_timeout: .inf", "server.yaml: drain_timeout: expected a number from 0 to 1000000, found inf"),
        ("port: 2020-13-45", "server.yaml: not valid YAML: month must be in 1..12"),
        ("port: " + 5000 * "[", "server.yaml: not valid YAML: nested too deep"),
        ("port: 1\ntp: 2\nport: 3", "server.yaml: not valid YAML: 'port' is there twice in "),
        ("options: {policy: {ageing: 1, ageing: 2}}", "server.yaml: not valid YAML: 'ageing' is there twice in "),
        ("page-size: 1\npage_size: 2", "server.yaml: page_size is there twice, with - and with _"),
        ("options: 5", "server.yaml: options: expected a mapping, found 5"),
        ("options: {polcy: {x: 1}}", "server.yaml: options.polcy: there is no kind 'polcy'. Did you mean 'policy'?"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_key(write: Any, text: str, says: str) -> None:
    assert says in refusal(file=write(text))


@pytest.mark.parametrize("field", msgspec.structs.fields(ServeConfig), ids=lambda field: field.name)
def test_every_number_has_bounds_that_other_processes_can_be_told(field: Any) -> None:
    if isinstance(field.default, bool) or not isinstance(field.default, int | float):
        return
    for value in (10**20, math.inf, 1e300):
        assert f"expected a{'n integer' if isinstance(field.default, int) else ' number'} " in refusal(
            cli={field.name: value}
        )


def test_a_word_may_look_like_a_date_that_does_not_exist() -> None:
    assert load(cli={"served_model_name": "2020-13-45"}).served_model_name == "2020-13-45"


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    assert refusal(file=tmp_path / "none.yaml") == f"{tmp_path}/none.yaml: No such file or directory"


def test_an_empty_file_sets_nothing(write: Any) -> None:
    assert load(file=write("# nothing\n")) == ServeConfig()


@pytest.mark.usefixtures("made_up_options")
def test_options_are_read_from_every_source(write: Any) -> None:
    file = write("options:\n  transport: {a: 1, nng: {b: 2}}\n  transport.zmq: {c: 3}\n  policy.depth: 4\n")
    environ = {"TPSERVE_OPTIONS__SYNC__TIMEOUT": "5", "TPSERVE_OPTIONS__TRANSPORT__NNG__D": "6"}

    config = load(flags=["attention.triton.splits=7", "comm.x=a=b"], file=file, environ=environ)

    assert config.options == {
        "transport": {"a": 1},
        "transport.nng": {"b": 2, "d": "6"},
        "transport.zmq": {"c": 3},
        "policy": {"depth": 4},
        "sync": {"timeout": "5"},
        "attention.triton": {"splits": "7"},
        "comm": {"x": "a=b"},
    }


@pytest.mark.usefixtures("made_up_options")
def test_a_named_plugin_wins_within_a_source_and_a_later_source_wins_over_it(write: Any) -> None:
    file = write("options: {transport: {a: 1, b: 1}, transport.nng: {a: 2, b: 2}}")

    within = load(file=file).options
    over = load(file=file, flags=["transport.a=3"]).options

    assert plugin_options(within, "transport", "nng") == {"a": 2, "b": 2}
    assert plugin_options(over, "transport", "nng") == {"a": "3", "b": 2}
    assert plugin_options(over, "transport", "zmq") == {"a": "3", "b": 1}
    assert plugin_options(over, "transport", "zmq", general=False) == {}
    assert plugin_options(over, "policy", "fcfs") == {}


@pytest.mark.usefixtures("made_up_options")
def test_options_may_come_as_a_table_from_python() -> None:
    config = load(cli={"options": {"transport": {"a": 1}}})

    assert config.options == {"transport": {"a": 1}}


def test_names_in_errors_can_be_those_of_a_python_caller() -> None:
    with pytest.raises(ConfigError, match=r"^tp: expected an integer from 1 to 1024, found 0$"):
        load_settings({"tp": 0}, [], None, {}, label=str)


@pytest.mark.usefixtures("made_up_options")
def test_unknown_variables_are_named_and_never_an_error() -> None:
    environ = {
        "TPSERVE_PRT": "1",
        "TPSERVE_CACHE": "/x",
        "TPSERVE_PORT": "1",
        "TPSERVE_OPTIONS__TRANSPORT__A": "1",
        "TPSERVE_OPTIONS__NOTHING__A": "1",
        "HOME": "/",
    }

    assert load(environ=environ).port == 1
    assert unknown_variables(environ) == [
        "TPSERVE_OPTIONS__NOTHING__A sets nothing",
        "TPSERVE_PRT sets nothing; did you mean TPSERVE_PORT?",
    ]


def test_flags_of_settings_and_kinds() -> None:
    assert flag_name("max_running_requests") == "--max-running-requests"
    assert kind_flag("attention") == "--attn"
    assert kind_flag("transport") == "--transport"


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("transport.nng.nope=1", "-o transport.nng.nope=1: transport.nng has no option 'nope'"),
        ("transport.bogus.nope=1", "-o transport.bogus.nope=1: there is no transport plugin named 'bogus'"),
        ("comm.whatever=1", "-o comm.whatever=1: no comm has an option 'whatever'"),
        ("transport.zmq.send_buffer=x", "-o transport.zmq.send_buffer=x: option transport.zmq.send_buffer: "),
        ("transport.send_buffer=x", "-o transport.send_buffer=x: option transport."),
    ],
)
def test_options_of_parts_that_are_not_used_are_checked_too(flag: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({}, [flag], None, {})
    assert caught.value.message.startswith(says)


def test_a_wrong_option_names_the_variable_or_the_file_that_has_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("options: {transport.nng: {nope: 1}}")
    with pytest.raises(ConfigError, match=r"settings\.yaml: options\.transport\.nng: transport\.nng has no option"):
        load_settings({}, [], file, {})
    with pytest.raises(ConfigError, match="TPSERVE_OPTIONS__COMM__NOPE: no comm has an option"):
        load_settings({}, [], None, {"TPSERVE_OPTIONS__COMM__NOPE": "1"})


def test_a_name_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"MODEL: .* is not text in UTF-8. Rename the file or folder"):
        load_settings({"model": "/models/\udcff"}, [], None, {})
    with pytest.raises(ConfigError, match=r"TPSERVE_PORT: .* is not text in UTF-8$"):
        load_settings({}, [], None, {"TPSERVE_PORT": "\udcff"})
    for setting in ("model", "record", "profile", "host"):
        with pytest.raises(ConfigError, match=r"'a\\x00b' has a NUL, which no name can have. Take it out"):
            load_settings({setting: "a\0b"}, [], None, {})


def test_a_context_must_hold_something() -> None:
    with pytest.raises(ConfigError, match=r"max_context is 1. Choose 8 or more, or 0"):
        load_settings({"max_context": 1}, [], None, {})
    assert load_settings({"max_context": 8}, [], None, {}).max_context == 8
