"""What several files say of the workspace is the same in all of them."""

from __future__ import annotations

import importlib.util
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
