"""Who may import whom: the whole import graph, read from the source and held to the architecture's rules."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "corepkg"
PLUGINS = sorted([*(ROOT / "plugins").glob("*/src"), *(ROOT / "examples").glob("*/src")])
HEAVY = {"torch", "transformers", "accelerate", "zmq", "pynng", "triton", "flashinfer"}
LIGHT = ("api", "cli", "config", "envelope", "errors", "frontend", "kv", "messages", "plugins", "policies", "scheduler")
LIGHT += ("settings", "step", "values", "version", "weights.source", "launch", "bench.serve")


class Import(NamedTuple):
    """One import statement's target.

    Attributes:
        module: the module that has the statement.
        target: what it imports, as far as it is a module; for ``from a import b`` both ``a`` and ``a.b``.
        at_load: whether it runs when the module is loaded, and not in a function or for type checkers only.
    """

    module: str
    target: str
    at_load: bool


@cache
def imports() -> tuple[Import, ...]:
    return tuple(
        found for root in (CORE, *PLUGINS) for file in sorted(root.rglob("*.py")) for found in imports_of(root, file)
    )


def imports_of(root: Path, file: Path) -> Iterator[Import]:
    parts = file.relative_to(root).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    for node, at_load in statements(ast.parse(file.read_text(encoding="utf-8")), at_load=True):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield Import(module, node.module, at_load)
            yield from (Import(module, f"{node.module}.{alias.name}", at_load) for alias in node.names)


def statements(node: ast.AST, *, at_load: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = at_load and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from ((found, False) for found, _ in statements(child, at_load=False))
        else:
            yield child, inside
            yield from statements(child, at_load=inside)


def within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def breaches(importers: Iterable[str], forbidden: Iterable[str], *, allowed: Iterable[str] = ()) -> list[str]:
    """Imports from some packages into others, wherever in the file they stand."""
    return sorted(
        {
            f"{found.module} imports {found.target}"
            for found in imports()
            if within(found.module, importers)
            and within(found.target, forbidden)
            and not within(found.module, allowed)
            and not within(found.target, allowed)
        }
    )


def loaded_by(module: str) -> dict[str, str]:
    """Every module that importing one loads, ours and others', with the one that asked for it."""
    modules = {found.module for found in imports()}
    waiting, seen = [(module, module)], {}
    while waiting:
        name, asker = waiting.pop()
        for end in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:end])
            if part not in seen:
                seen[part] = asker
                if part in modules:
                    waiting += [(found.target, part) for found in imports() if found.module == part and found.at_load]
    return seen


def test_the_walk_sees_the_packages() -> None:
    modules = {found.module for found in imports()}

    assert {"tpserve.api.transport", "tpserve.cli.main", "tpserve_transport_zmq.plugin"} <= modules
    assert Import("tpserve.api.attention", "torch", at_load=False) in imports()
    assert "typer" in loaded_by("tpserve.cli.main")
    assert "msgspec" in loaded_by("tpserve.cli.main")


def test_the_api_imports_nothing_else_of_ours() -> None:
    assert breaches(["tpserve.api"], ["tpserve"], allowed=["tpserve.api"]) == []


def test_the_api_needs_the_standard_library_msgspec_and_pluggy_only() -> None:
    needed = {name.split(".")[0] for name in loaded_by("tpserve.api")}

    assert needed - set(sys.stdlib_module_names) == {"tpserve", "msgspec", "pluggy"}


def test_plugin_packages_import_the_api_and_fall_back_on_the_reference() -> None:
    allowed = ["tpserve.api", "tpserve.ops.reference"]
    packages = {folder.name for source in PLUGINS for folder in source.iterdir() if (folder / "__init__.py").exists()}

    assert len(packages) == len(PLUGINS)
    for package in sorted(packages):
        assert breaches([package], ["tpserve", *(packages - {package})], allowed=allowed) == []


@pytest.mark.parametrize(
    ("importers", "forbidden"),
    [
        (["scheduler", "kv", "policies"], ["engine", "models", "weights", "attention", "ops", "comm"]),
        (["scheduler", "kv", "policies"], ["launch", "frontend", "cli", "offline", "plugins"]),
        (["kv", "policies"], ["scheduler"]),
        (["engine", "models", "weights"], ["scheduler", "kv", "policies", "launch", "frontend", "cli", "offline"]),
        (["transports", "sync", "policies", "attention", "ops", "comm"], ["engine", "scheduler", "launch", "frontend"]),
        (["frontend"], ["scheduler", "engine", "kv", "policies", "cli", "offline"]),
        (["config", "settings", "messages", "step", "envelope", "plugins"], ["cli", "launch", "frontend", "engine"]),
    ],
)
def test_packages_do_not_know_each_other(importers: list[str], forbidden: list[str]) -> None:
    assert breaches([f"tpserve.{name}" for name in importers], [f"tpserve.{name}" for name in forbidden]) == []


def test_nobody_imports_the_command_line() -> None:
    assert breaches(["tpserve"], ["tpserve.cli"], allowed=["tpserve.cli", "tpserve.__main__"]) == []


def test_one_module_composes_a_rank() -> None:
    composers = {
        found.module
        for found in imports()
        if within(found.target, ["tpserve.engine"]) and not within(found.module, ["tpserve.engine"])
    }

    assert composers <= {"tpserve.launch.rank"}


def test_the_runtime_does_not_import_the_conformance_kit() -> None:
    assert breaches(["tpserve"], ["tpserve.testing"], allowed=["tpserve.testing"]) == []


@pytest.mark.parametrize("package", LIGHT)
def test_light_packages_load_no_heavy_library(package: str) -> None:
    modules = {found.module for found in imports() if within(found.module, [f"tpserve.{package}"])}

    for module in sorted(modules):
        loaded = loaded_by(module)
        assert {name: loaded[name] for name in HEAVY & set(loaded)} == {}


def test_light_modules_of_plugins_load_no_heavy_library() -> None:
    modules = {found.module for found in imports() if found.module.endswith(".plugin")}

    assert len(modules) >= len(PLUGINS)
    for module in sorted(modules):
        assert HEAVY & set(loaded_by(module)) == set()


def test_scheduling_needs_no_tensors() -> None:
    assert breaches(["tpserve.scheduler", "tpserve.kv", "tpserve.policies"], ["torch", "numpy"]) == []


def test_what_decides_reads_no_clock_and_draws_no_random_number() -> None:
    deciders = ["kv", "policies", "api.policy", "scheduler.batch", "scheduler.queues", "scheduler.digest"]

    assert breaches([f"tpserve.{name}" for name in deciders], ["time", "datetime", "random", "secrets", "uuid"]) == []
    assert breaches(["tpserve.scheduler"], ["random", "secrets", "uuid"]) == []


@pytest.mark.parametrize(
    "code",
    [
        "import tpserve",
        "import tpserve.api",
        "import tpserve.settings, tpserve.plugins.registry",
        "import tpserve.scheduler.scheduler, tpserve.kv.allocator, tpserve.policies.fcfs",
        "import tpserve.plugins.registry as r; g = r.Registry.discover(); [g.describe(e) for e in g.entries()]",
    ],
)
def test_a_process_that_imports_it_has_no_heavy_library(code: str) -> None:
    check = f"{code}\nimport sys; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"


def test_children_import_from_the_installation_and_not_from_the_current_folder() -> None:
    starts = [
        f"{file.name}: {ast.unparse(node)}"
        for file in sorted(CORE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.List | ast.Tuple) and ast.unparse(node).lstrip("[(").startswith("sys.executable, '-")
    ]
    runs_modules = [start for start in starts if "'-m'" in start]
    assert len(runs_modules) > 5
    assert [start for start in runs_modules if "sys.executable, '-P', '-m'" not in start] == []
