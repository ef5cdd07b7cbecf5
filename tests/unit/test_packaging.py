"""What several files say of the workspace is the same in all of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml"))


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def test_pip_and_uv_are_held_to_the_same_versions() -> None:
    lines = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()

    assert [line for line in lines if line and not line.startswith("#")] == project(ROOT)["tool"]["uv"][
        "constraint-dependencies"
    ]


def test_every_package_of_the_workspace_is_type_checked() -> None:
    mypy = project(ROOT)["tool"]["mypy"]
    packages = {folder.name for plugin in PLUGINS for folder in (plugin / "src").iterdir() if folder.is_dir()}

    assert set(mypy["packages"]) == {"tpserve", *packages}
    assert set(mypy["mypy_path"]) == {"corepkg", *(f"{plugin.relative_to(ROOT)}/src" for plugin in PLUGINS)}


def test_packages_agree_on_python_and_licence() -> None:
    for folder in (ROOT, *PLUGINS):
        table = project(folder)["project"]
        assert table["requires-python"] == ">=3.11"
        assert table["license"] == "Apache-2.0"


def test_entry_points_name_modules_that_exist() -> None:
    for folder in (ROOT, *PLUGINS):
        for name, module in project(folder)["project"]["entry-points"]["tpserve"].items():
            assert importlib.util.find_spec(module) is not None, name


def test_an_environment_without_pip_gets_it_from_the_interpreter(tmp_path: Path) -> None:
    venv, modules = tmp_path / "venv", tmp_path / "modules"
    modules.mkdir()

    def run(*command: str) -> str:
        env = os.environ | {"PYTHONPATH": str(modules)}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True).stdout

    run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    recipe = run("make", "-n", f"VENV={venv}", f"{venv}/.installed").splitlines()
    (line,) = [line for line in recipe if "ensurepip" in line]
    (modules / "ensurepip.py").write_text("print('in place of the real one, which takes seconds')")
    assert run("sh", "-c", line).startswith("in place")
    (modules / "pip.py").write_text("")
    assert run("sh", "-c", line) == ""
