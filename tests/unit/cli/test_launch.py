"""``tpserve launch`` up to the point where processes start."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tpserve.config import ServeConfig
from tpserve.settings import flag_name

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder whose shape can be read and whose weights cannot."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("not weights")
    return str(folder)


def test_every_setting_has_a_flag(run_cli: Any) -> None:
    shown = run_cli("launch", "--help").stdout
    flags = [flag_name(field) for field in ServeConfig.__struct_fields__ if field not in ("model", "options")]
    assert [flag for flag in [*flags, "--option", "-o", "--config", "--dry-run", "--json"] if flag not in shown] == []


def test_a_dry_run_prints_the_composition_and_reads_no_weights(run_cli: Any, model: str) -> None:
    done = run_cli("launch", model, "--tp", "2", "--transport", "nng", "--dry-run")
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "small" in rows["model"]
    assert "6+3 query heads, 2+1 KV heads" in rows["tp"]
    assert "nng" in rows["transport"]
    assert "asked for" in rows["transport"]
    assert "auto" in rows["sync"]


def test_a_dry_run_prints_json(run_cli: Any, model: str) -> None:
    done = run_cli("launch", model, "--tp", "3", "--dry-run", "--json", "-o", "transport.send_buffer=65536")
    plan = json.loads(done.stdout)
    assert plan["config"]["tp"] == 3
    assert plan["folder"]["name"] == "small"
    assert plan["composition"]["transport"]["name"] == "zmq"
    assert plan["composition"]["transport"]["options"] == {"send_buffer": "65536"}
    assert [share["q_heads"] for share in plan["composition"]["partitions"]] == [
        {"start": 0, "stop": 3},
        {"start": 3, "stop": 6},
        {"start": 6, "stop": 9},
    ]


def test_flags_win_over_environment_and_file(
    run_cli: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("tp: 3\npage_size: 8\nmax_running_requests: 7\n")
    monkeypatch.setenv("TPSERVE_PAGE_SIZE", "32")
    monkeypatch.setenv("TPSERVE_MAX_RUNNING_REQUESTS", "9")
    monkeypatch.setenv("TPSERVE_MAX_RUNING_REQUESTS", "1")
    done = run_cli("launch", model, "--config", str(file), "--max-running-requests", "5", "--dry-run", "--json")
    config = json.loads(done.stdout)["config"]
    assert (config["tp"], config["page_size"], config["max_running_requests"]) == (3, 32, 5)
    assert (
        done.stderr == "warning: TPSERVE_MAX_RUNING_REQUESTS sets nothing; did you mean TPSERVE_MAX_RUNNING_REQUESTS?\n"
    )


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--tp", "2", "--attn", "flashinfer"], "error: attention.flashinfer is unavailable: "),
        (["--transport", "inproc"], "error: transport.inproc works inside one process only\n"),
        (["--sync", "nonesuch"], "error: there is no sync plugin named 'nonesuch'\n"),
        (["--tp", "5"], "error: a model with 9 query heads and 3 KV heads cannot be split over 5 ranks\n"),
        (["--device", "cuda"], "error: no CUDA device can be used: "),
        (["--port", "70000"], "error: --port: expected an integer from 0 to 65535, found 70000\n"),
        (["-o", "transport.nonesuch=1"], "error: -o transport.nonesuch=1: no transport has an option 'nonesuch'\n"),
    ],
)
def test_what_cannot_be_is_refused_in_two_lines(run_cli: Any, model: str, flags: list[str], error: str) -> None:
    done = run_cli("launch", model, "--dry-run", *flags)
    assert done.returncode == 2
    assert done.stderr.startswith(error)
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--host", "nosuch.invalid"], "error: --host nosuch.invalid is no address: "),
        (["--host", "192.0.2.1", "--port", "8123"], "error: cannot listen on 192.0.2.1 port 8123: "),
        (["--record", "/proc/x"], "error: /proc/x cannot be written: "),
        (["--record", "/nowhere/x"], "error: /nowhere/x: there is no folder /nowhere\n"),
        (["--record", "r", "--profile", "r"], "error: record would write "),
        (["--profile", ".", "--record", "rank0.json"], "error: record and profile would both write rank0.json\nhint: "),
        (["--record", "small/tokenizer.json"], "error: record would overwrite "),
        (
            ["--config", "c", "--record", "c"],
            "error: record would overwrite c, read as the file of --config\nhint: Choose",
        ),
        (["--profile", "/proc/x"], "error: no traces can be written in /proc/x: "),
        (["--profile", "/dev/null"], "error: no traces can be written in /dev/null: Not a directory\n"),
    ],
)
def test_a_dry_run_refuses_what_a_start_would(
    run_cli: Any, model: str, tmp_path: Path, flags: list[str], error: str
) -> None:
    (tmp_path / "c").write_text("tp: 1")
    done = run_cli("launch", model, "--dry-run", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(error)


def test_a_dry_run_leaves_nothing_and_takes_no_port(run_cli: Any, model: str, tmp_path: Path) -> None:
    given = ["--record", str(tmp_path / "record"), "--profile", str(tmp_path / "deep" / "traces")]
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = run_cli("launch", model, "--dry-run", "--port", str(other.getsockname()[1]), *given)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize("command", [["launch", "", "--dry-run"], ["generate", "-", ""]])
def test_a_model_without_a_name_is_refused(run_cli: Any, command: list[str]) -> None:
    done = run_cli(*command)
    assert done.returncode == 2
    assert done.stderr == "error: the model's name is empty\nhint: Leave it out for the embedded model\n"


def test_a_busy_port_is_noticed_before_anything_is_loaded(run_cli: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_cli("launch", "/no/such/model", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: port {port} on 127.0.0.1 is already in use\nhint: Choose another with --port; 0 takes a free one\n"
    )


def test_json_without_a_dry_run(run_cli: Any) -> None:
    done = run_cli("launch", "--json")
    assert (done.returncode, done.stderr) == (2, "error: --json goes with --dry-run\n")


def test_limits_that_cannot_be_met_as_they_were_asked_for_are_told(run_cli: Any, model: str) -> None:
    lines = run_cli("launch", model, "--dry-run", "--max-context", "1000000", "--kv-tokens", "1000").stdout.splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert "the model's limit, below 1,000,000" in rows["context"]
    assert rows["KV"].split()[2:] == ["1,008", "tokens", "1,000", "in", "whole", "pages", "of", "16"]
    assert not {"context", "KV"} & {
        line.split()[0] for line in run_cli("launch", model, "--dry-run").stdout.splitlines()
    }
