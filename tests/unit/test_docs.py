"""What the documentation shows is run, so that it stays true."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tpserve.api import Limits, WaitingRequest
from tpserve.plugins.registry import Registry
from tpserve.testing.queues import CountingView, QueueState

ROOT = Path(__file__).parents[2]
WRITING_A_PLUGIN = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")])


@pytest.fixture
def example(site: Any, tmp_path: Path, run_cli: Any) -> Any:
    """The example of writing-a-plugin.md, made as the page says, built and installed."""
    commands = re.findall(r"^tpserve (plugins new .*)$", WRITING_A_PLUGIN, re.MULTILINE)
    assert commands == ["plugins new policy smallest"]
    assert run_cli(*commands[0].split()).returncode == 0
    source = tmp_path / "tpserve-policy-smallest"
    replace(source / re.findall(r"`(src/\S+\.py)`", WRITING_A_PLUGIN)[0])
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site.path)
    return site


def replace(file: Path) -> None:
    """Put the page's function in the place of the one of the same name, the last in the file."""
    [(name, text)] = re.findall(r"^```python replaces=(\w+)\n(.*?)^```$", WRITING_A_PLUGIN, re.MULTILINE | re.DOTALL)
    before, function, _ = file.read_text().partition(f"def {name}(")
    assert function
    file.write_text(before + text)


def test_the_example_plugin_is_listed_and_described(example: Any, run_cli: Any) -> None:
    [row] = [
        row
        for row in json.loads(run_cli("plugins", "list", "--json", "--kind", "policy").stdout)
        if row["name"] == "smallest"
    ]
    shown = run_cli("plugins", "show", "policy.smallest").stdout

    assert (row["distribution"], row["status"], row["api"]) == ("tpserve-policy-smallest", "available", 1)
    assert "how many of the oldest waiting requests are looked at" in shown
    assert "an integer of at least 1; default 32" in shown


def test_the_example_plugin_plans_as_the_page_says_and_keeps_the_contract(example: Any, run_cli: Any) -> None:
    plugin = Registry.discover().load("policy", "smallest")
    policy = plugin.factory()(plugin.make_options({"window": "3"}))
    sizes = [(4, 1, 14), (30, 8, 2), (9, 3, 0), (1, 1, 0)]
    waiting = [
        WaitingRequest(uid, uid, since=0, priority=0, cached=0, tokens=tokens, pages=pages, promised=promised)
        for uid, (tokens, pages, promised) in enumerate(sizes)
    ]
    limits = Limits(tokens=100, chunk=100, running=8, free_pages=99, promised_pages=0)
    state = QueueState(5, limits, waiting, [])

    assert [prefill.uid for prefill in policy.plan(CountingView(state)).prefill] == [2, 1, 0]
    assert run_cli("plugins", "check", "policy.smallest").returncode == 0


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tpserve\.[\w.]+)`", WRITING_A_PLUGIN))))
def test_every_name_on_the_page_exists(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


def test_the_reference_of_the_command_line_is_up_to_date() -> None:
    location = ROOT / "scripts" / "cli_reference.py"
    spec = importlib.util.spec_from_file_location("cli_reference", location)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    current = script.PAGE.read_text(encoding="utf-8")
    assert current == script.page(current), "docs/cli.md is not up to date: run make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
