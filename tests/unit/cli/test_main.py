"""The command line as people meet it: help, mistakes, and broken packages that harm nobody."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.models import OptionInfo

from tpserve.cli.main import COMMANDS

HEAVY = ["torch", "zmq", "pynng", "fastapi", "starlette", "transformers", "rich", "yaml"]


def test_help_lists_every_command_with_its_summary(run_cli: Any) -> None:
    done = run_cli("--help")

    assert done.returncode == 0
    for name, summary in COMMANDS.items():
        assert f"{name} " in done.stdout
        assert summary in done.stdout


@pytest.mark.parametrize("command", [["launch"], ["generate"], ["bench", "transport"]])
def test_the_usage_has_no_brackets_in_brackets(run_cli: Any, command: list[str]) -> None:
    assert "[[" not in run_cli(*command, "--help").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_that_may_be_repeated_have_names_of_their_own(name: str) -> None:
    """Some versions of typer would call them by their metavar."""
    for command in importlib.import_module(f"tpserve.cli.{name}").app.registered_commands:
        for hint in get_type_hints(command.callback, include_extras=True).values():
            options = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, OptionInfo)]
            # In an annotation, what stands in the place of the default is the first name.
            assert all(each.default is not ... for each in options if "list[" in str(hint.__origin__))


def test_help_loads_no_heavy_library() -> None:
    code = f"""
import sys
from tpserve.cli.main import main
sys.argv = ["tpserve", "--help"]
try:
    main()
except SystemExit:
    print("loaded:", [name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip().endswith("loaded: []")


def test_the_version_is_printed(run_cli: Any) -> None:
    said = run_cli("--version").stdout
    assert said.startswith("tpserve 0.")
    module = subprocess.run([sys.executable, "-m", "tpserve", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == said


@pytest.mark.parametrize("interrupted", ["tpserve.cli.main", "tpserve.weights.source"])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_word(interrupted: str) -> None:
    code = f"""
import sys
from tpserve.__main__ import main

class Finder:
    def find_spec(self, name, path, target=None):
        if name == {interrupted!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
sys.argv = ["tpserve", "model", "path"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *[
            (
                [*command, ""],
                f"Error: Invalid value for '{name}': the name is empty: is a variable in the command not set?",
            )
            for name, command in {
                "INPUT": ["generate"],
                "-o' / '--output": ["generate", "a", "-o"],
                "--config": ["launch", "--config"],
                "FILE": ["replay"],
                "--dir": ["plugins", "new", "policy", "x", "--dir"],
            }.items()
        ],
        (["plugns"], "Did you mean 'plugins'?"),
        (["plugins", "list", "--kind", "polcy"], "hint: Did you mean 'policy'?"),
        (["plugins", "show", "zmq"], "error: there is no plugin 'zmq'\nhint: Did you mean 'transport.zmq'?"),
        (["plugins", "show", "policy.fcsf"], "hint: Did you mean 'policy.fcfs'?"),
        (["plugins", "show", "transport.nope"], "hint: Plugins of kind transport: transport.gloo, transport.inproc, "),
        (["plugins", "show", "transprt.zmq"], "hint: Did you mean 'transport.zmq'?"),
        (["plugins", "show", "kind.zmq"], "hint: Plugins are KIND.NAME, and kinds transport, sync, "),
        (["plugins", "show", "nothing"], "hint: Plugins are KIND.NAME: transport.gloo, "),
    ],
)
def test_a_mistake_ends_with_exit_code_2_and_a_hint(run_cli: Any, arguments: list[str], says: str) -> None:
    done = run_cli(*arguments)

    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def bad_site(site: Any) -> Any:
    """Every way in which a third party's package can be wrong, at once."""
    raising = {"bad/__init__.py": "", "bad/raising.py": "TPSERVE_API = 1\nraise RuntimeError('no luck')\n"}
    newer = {"bad/newer.py": "TPSERVE_API = 99\nfrom tpserve.api import Unheard\n"}
    site.add("bad", {"policy.raising": "bad.raising", "policy.newer": "bad.newer"}, raising | newer)
    site.add("twin-a", {"sync.twin": "a.plugin"})
    site.add("twin-b", {"sync.twin": "b.plugin"})
    site.add("stray", {"nonsense.x": "a.plugin", "nameless": "a.plugin"})
    return site


def test_the_list_names_what_is_wrong_with_each(run_cli: Any, bad_site: Any) -> None:
    done = run_cli("plugins", "list", "--json")

    assert done.returncode == 0
    assert done.stderr == ""
    rows = {(row["kind"], row["name"], row["distribution"]): row for row in json.loads(done.stdout)}
    assert rows["policy", "raising", "bad"]["status"] == "broken"
    assert rows["policy", "raising", "bad"]["reason"] == "bad.raising: RuntimeError: no luck"
    assert rows["policy", "newer", "bad"]["status"] == "incompatible"
    assert rows["policy", "newer", "bad"]["api"] == 99
    assert {rows["sync", "twin", twin]["status"] for twin in ("twin-a", "twin-b")} == {"conflict"}
    assert "twin-a 1.0 and by twin-b 1.0" in rows["sync", "twin", "twin-a"]["reason"]
    assert rows["nonsense", "x", "stray"]["status"] == "broken"
    assert rows["nameless", "", "stray"]["status"] == "broken"
    assert rows["policy", "fcfs", "tpserve"]["status"] == "available"
    assert rows["transport", "zmq", "tpserve-transport-zmq"]["api"] == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_an_import_that_does_not_end_is_given_up(site: Any, threads: int) -> None:
    """In a child, and in this process where other threads forbid to fork one."""
    sleepy = "TPSERVE_API = 1\nimport time\ntime.sleep(1e6)\n"
    site.add("sleepy", {"policy.sleepy": "sleepy", "policy.nap": "nap.plugin"}, {"sleepy/__init__.py": sleepy})
    site.add("nap", {}, {"nap/__init__.py": sleepy, "nap/plugin.py": ""})
    code = f"""
import signal, sys, threading, time
from tpserve.cli.main import main
from tpserve.plugins import loading

if {threads} > 1:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
loading.IMPORT_SECONDS = 2.0
sys.argv = ["tpserve", "plugins", "list", "--kind", "policy", "--json"]
try:
    main()
finally:
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    waiting = "waiting for the import of policy.nap, policy.sleepy, 2 s at most\n"
    assert (done.returncode, done.stderr) == (0, waiting if threads == 1 else "")
    rows = {row["name"]: (row["status"], row["reason"]) for row in json.loads(done.stdout)}
    assert rows["sleepy"] == rows["nap"] == ("broken", "its import took longer than 2 s")
    assert rows["fcfs"] == ("available", "")


def test_the_table_has_a_line_for_each(run_cli: Any, bad_site: Any) -> None:
    lines = run_cli("plugins", "list", "--kind", "policy").stdout.splitlines()

    assert lines[0].split() == ["kind", "name", "distribution", "version", "api", "status", "reason"]
    assert [line.split()[1] for line in lines[1:]] == ["fcfs", "lpm", "newer", "priority", "raising"]
    assert lines[5].endswith("broken        bad.raising: RuntimeError: no luck")


def test_a_crashing_import_harms_nobody_else(run_cli: Any, site: Any) -> None:
    crash = "TPSERVE_API = 1\nimport ctypes\nctypes.string_at(0)\n"
    site.add("crash", {"transport.crash": "crash"}, {"crash/__init__.py": crash})
    says = "its import ended the process with signal SIGSEGV"

    rows = {row["name"]: row for row in json.loads(run_cli("plugins", "list", "--kind", "transport", "--json").stdout)}
    assert [rows["crash"][key] for key in ("status", "reason", "api")] == ["broken", says, 1]
    assert rows["inproc"]["status"] == "available"
    asked = run_cli("plugins", "show", "transport.crash")
    hint = "That is a fault of crash 1.0"
    assert (asked.returncode, asked.stderr) == (2, f"error: transport.crash is broken: {says}\nhint: {hint}\n")
    assert run_cli("env").returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "show", "policy.fcfs"], ["env"]])
def test_other_commands_work_beside_broken_packages(run_cli: Any, bad_site: Any, arguments: list[str]) -> None:
    done = run_cli(*arguments)

    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        ("policy.raising", "error: policy.raising is broken: bad.raising: RuntimeError: no luck\nhint: Reinstall"),
        ("policy.newer", "error: policy.newer is incompatible: written for plugin API 99"),
        ("sync.twin", "error: sync.twin is ambiguous: provided by twin-a 1.0 and by twin-b 1.0\nhint: Uninstall"),
        ("nonsense.x", "error: nonsense.x is broken: there is no kind 'nonsense'"),
    ],
)
def test_asking_for_a_broken_plugin_says_why(run_cli: Any, bad_site: Any, plugin: str, says: str) -> None:
    done = run_cli("plugins", "show", plugin)

    assert done.returncode == 2
    assert done.stderr.startswith(says)
    assert "Traceback" not in done.stderr


def test_show_describes_options_and_capabilities(run_cli: Any) -> None:
    shown = run_cli("plugins", "show", "transport.nng").stdout
    data = json.loads(run_cli("plugins", "show", "transport.nng", "--json").stdout)

    assert "--transport nng" in shown
    assert f"-o transport.{data['options'][0]['name']}=" in shown
    assert data["capabilities"]["fanout"] is True
    assert data["requires"] == ["pynng>=0.9"]
    assert all(option["doc"] and option["type"] for option in data["options"])


def test_kernels_that_cannot_run_here_say_why(run_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = json.loads(run_cli("plugins", "list", "--json", "--kind", "attention").stdout)
    states = {row["name"]: (row["status"], row["reason"]) for row in rows}

    assert states["torch"] == ("available", "")
    for name, needed in {"flashinfer": "flashinfer-python>=0.6.6,<0.7", "triton": "triton>=3.6"}.items():
        status, reason = states[name]
        assert status == "unavailable"
        assert reason.startswith((f"needs {needed}, which is not installed", "there is no CUDA device"))


def test_env_describes_machine_versions_and_plugins(run_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSERVE_PRT", "1")
    report = json.loads(run_cli("env", "--json").stdout)

    assert report["machine"]["cores"] >= 1
    assert report["machine"]["memory_gib"] > 0
    assert report["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert report["versions"]["tpserve"]
    assert report["warnings"] == ["TPSERVE_PRT sets nothing; did you mean TPSERVE_PORT?"]
    assert any(row["name"] == "zmq" for row in report["plugins"])
    assert "TPSERVE_PRT" in run_cli("env").stdout


def test_what_is_no_text_is_escaped(run_cli: Any, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TPSERVE_\udcff", "1")
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    files = {"odd/__init__.py": "TPSERVE_API = 1\nraise RuntimeError('no \\udcff')\n"}
    site.add("odd", {"policy.odd": "odd"}, files)
    report = json.loads(run_cli("env", "--json").stdout)

    assert report["environment"][r"TPSERVE_\udcff"] == "1"
    assert r"odd: RuntimeError: no \udcff" in [row["reason"] for row in report["plugins"]]
    shown = run_cli("env").stdout
    assert [r"TPSERVE_\udcff", "1"] in [line.split() for line in shown.splitlines()]
    assert r"odd: RuntimeError: no \udcff" in shown


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'NVIDIA H200, 143771 MiB, 570.1, 9.0'", ["NVIDIA H200, 143771 MiB, 570.1, 9.0"]),
        ("echo 'no devices were found' >&2; exit 6", ["nvidia-smi failed: no devices were found"]),
    ],
)
def test_env_reports_what_nvidia_smi_says(
    run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: list[str]
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")

    assert json.loads(run_cli("env", "--json").stdout)["machine"]["gpus"] == says
