"""Packages as ``tpserve plugins new`` writes them: they install, pass their own tests, and serve."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest
from tests.integration.launched import Launched

from tpserve import LLM, SamplingParams
from tpserve.api import KINDS
from tpserve.settings import kind_flag
from tpserve.testing.models import make_model

pytestmark = pytest.mark.slow

NAME = "my_own"
HANG = 600
"""Seconds after which something is taken to hang."""


class Environment:
    """An environment over the one that runs the tests, with a new package of each kind."""

    def __init__(self, folder: Path) -> None:
        self.packages = {kind: folder / kind for kind in KINDS}
        run(sys.executable, "-m", "venv", "--without-pip", folder / "environment", cwd=folder)
        self.python = folder / "environment" / "bin" / "python"
        scheme = {"base": str(folder / "environment"), "platbase": str(folder / "environment")}
        below = Path(sysconfig.get_path("purelib", "venv", vars=scheme), "below.pth")
        below.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        for kind, package in self.packages.items():
            self.tpserve("plugins", "new", kind, NAME, "--dir", str(package), cwd=folder)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "install",
            "--disable-pip-version-check",
            "--quiet",
        ]
        run(*pip, "--no-deps", "--no-index", "--no-build-isolation", *self.packages.values(), cwd=folder)

    def tpserve(self, *arguments: str, cwd: Path) -> str:
        """What a command prints."""
        return run(self.python, "-m", "tpserve.cli.main", *arguments, cwd=cwd)


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, and return its output."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ["OMP_NUM_THREADS"] = "1"  # the contracts' tensors are small
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, cwd=cwd, env=environ, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("new"))


def test_they_are_listed_and_available(environment: Environment, tmp_path: Path) -> None:
    rows = json.loads(environment.tpserve("plugins", "list", "--json", cwd=tmp_path))

    mine = {row["kind"]: (row["distribution"], row["status"]) for row in rows if row["name"] == NAME}
    assert mine == {kind: (f"tpserve-{kind}-my-own", "available") for kind in KINDS}


def test_their_own_tests_pass(environment: Environment) -> None:
    folder = environment.packages["transport"].parent
    flags = ["-v", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir=."]
    said = run(environment.python, "-m", "pytest", *flags, *(f"{kind}/tests" for kind in KINDS), cwd=folder)

    assert [kind for kind in KINDS if f"{kind}/tests/test_contract.py::" not in said] == []


def test_the_types_hold(environment: Environment, tmp_path: Path) -> None:
    for kind, package in environment.packages.items():
        shutil.copy(package / "tests" / "test_contract.py", tmp_path / f"test_{kind}.py")
    sources = [package / "src" for package in environment.packages.values()]
    # torch's own types take four times as long to read as all the rest.
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    run(sys.executable, "-m", "mypy", "--cache-dir", ".cache", *sources, ".", cwd=tmp_path)


def test_a_new_package_can_be_checked(environment: Environment, tmp_path: Path) -> None:
    said = environment.tpserve("plugins", "check", f"policy.{NAME}", "--fast", cwd=tmp_path)

    assert f"policy.{NAME} keeps the contract of the policy kind" in said


def test_all_of_them_serve_together(environment: Environment, runtime: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    prompt, count = "the rain in spain", 12
    flags = [part for kind in KINDS for part in (kind_flag(kind), NAME)]
    server = Launched(runtime, str(model), "--tp", "2", "--kv-tokens", "4096", *flags, python=environment.python)
    try:
        server.await_ready()
        body = {"model": "model", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANG)
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
    finally:
        server.kill()

    assert answer.status_code == 200, answer.text
    with LLM(str(model), kv_tokens=4096) as llm:
        [expected] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    assert answer.json()["choices"][0]["text"] == expected.text
