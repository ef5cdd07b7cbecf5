"""The wheels of all packages, installed outside the checkout, are all that a person needs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from threading import Thread, Timer

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT, *sorted(folder.parent for folder in ROOT.glob("plugins/*/pyproject.toml"))]

pytestmark = pytest.mark.slow


HANG = 300
"""Seconds after which something is taken to hang."""


def environ() -> dict[str, str]:
    """The environment, in which nothing points at the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return its output."""
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, cwd=cwd, env=environ(), capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, package, cwd=folder)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment's executables, with the wheels installed.

    Their requirements come from the environment that runs the test, whose editable installs stay out of sight.
    """
    environment = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", environment, cwd=environment)
    executables = environment / "bin"
    run(executables / "python", "-m", "pip", "install", "--no-deps", "--no-index", *wheels, cwd=environment)
    scheme = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=scheme))
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return executables


def test_there_is_a_wheel_for_each_package(wheels: list[Path]) -> None:
    names = {wheel.name.split("-")[0] for wheel in wheels}

    assert names == {
        "tpserve",
        "tpserve_attn_flashinfer",
        "tpserve_attn_triton",
        "tpserve_transport_nng",
        "tpserve_transport_zmq",
    }


def test_wheels_hold_the_package_its_types_and_nothing_else(wheels: list[Path]) -> None:
    for wheel in wheels:
        files = zipfile.ZipFile(wheel).namelist()
        package = wheel.name.split("-")[0]
        assert f"{package}/py.typed" in files
        assert {name.split("/")[0] for name in files} == {
            package,
            wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info",
        }


def test_requirements_leave_torch_to_the_machine(wheels: list[Path]) -> None:
    required = {}
    for wheel in wheels:
        archive = zipfile.ZipFile(wheel)
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
        required[wheel.name.split("-")[0]] = headers.get_all("Requires-Dist", [])

    assert "torch>=2.11" in required["tpserve"]
    assert not any("flashinfer" in line and "extra" not in line for line in required["tpserve_attn_flashinfer"])


def test_the_installed_command_finds_every_plugin(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import tpserve; print(tpserve.__file__)", cwd=tmp_path)
    rows = json.loads(run(installed / "tpserve", "plugins", "list", "--json", cwd=tmp_path))

    assert Path(where.strip()).is_relative_to(installed.parent)
    states = {f"{row['kind']}.{row['name']}": row["status"] for row in rows}
    projects = [tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8")) for package in PACKAGES]
    assert set(states) == {point for project in projects for point in project["project"]["entry-points"]["tpserve"]}
    assert set(states.values()) <= {"available", "unavailable"}
    assert {states[name] for name in ("transport.zmq", "transport.nng", "policy.fcfs", "comm.gloo")} == {"available"}


def test_the_templates_of_new_plugins_are_in_the_wheel(wheels: list[Path]) -> None:
    core = ROOT / "corepkg"
    [wheel] = [wheel for wheel in wheels if wheel.name.startswith("tpserve-")]
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("tpserve/plugins/templates/")}
    files = [path for path in (core / "tpserve" / "plugins" / "templates").rglob("*") if path.is_file()]

    assert packed == {path.relative_to(core).as_posix() for path in files}


def test_a_new_plugin_is_written_and_one_checked(installed: Path, tmp_path: Path) -> None:
    run(installed / "tpserve", "plugins", "new", "policy", "mine", cwd=tmp_path)
    assert (tmp_path / "tpserve-policy-mine" / "src" / "tpserve_policy_mine" / "policy.py").exists()
    assert "policy.fcfs keeps the contract" in run(
        installed / "tpserve", "plugins", "check", "policy.fcfs", cwd=tmp_path
    )


def test_plugins_load_from_the_wheels(installed: Path, tmp_path: Path) -> None:
    code = (
        "from tpserve.plugins.registry import Registry; import sys\n"
        "plugin = Registry.discover().load('transport', 'zmq')\n"
        "print(sys.modules[type(plugin.spec.options()).__module__].__file__)"
    )

    assert Path(run(installed / "python", "-c", code, cwd=tmp_path).strip()).is_relative_to(installed.parent)


def test_a_server_starts_answers_and_stops(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "tpserve"), "launch", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ(), stderr=subprocess.PIPE, text=True) as server:
        guard = Timer(HANG, server.kill)
        guard.start()
        try:
            url = address(server)
            assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
            body = {"prompt": "1, 2, 3, 4,", "max_tokens": 6, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=HANG, trust_env=False)
            assert answer.json()["choices"][0]["text"].startswith(" 5, 6")
            server.send_signal(signal.SIGINT)
            assert server.wait(HANG) == 0
        finally:
            guard.cancel()
            server.terminate()


def address(server: subprocess.Popen[str]) -> str:
    """Where a server that is starting can be reached, once it can."""
    assert server.stderr is not None
    lines = []
    for line in server.stderr:
        lines.append(line)
        if found := re.search(r"ready at (\S+)", line):
            Thread(target=server.stderr.read, daemon=True).start()
            return found[1]
    pytest.fail("the server did not start: " + "".join(lines))
