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

from tpserve.api import Limits
from tpserve.messages import Generate, SamplingParams
from tpserve.plugins.registry import Registry
from tpserve.scheduler.batch import breach
from tpserve.scheduler.queues import Queues, Request, View
from tpserve.testing.fake_engine import SMALL_LIMITS

ROOT = Path(__file__).parents[2]
WRITING_A_PLUGIN = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")])


@pytest.fixture
def example(site: Any, tmp_path: Path) -> Any:
    """The example package of writing-a-plugin.md, built and installed."""
    source = tmp_path / "example"
    for name, text in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", WRITING_A_PLUGIN, re.MULTILINE | re.DOTALL):
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site.path)
    return site


def test_the_example_plugin_is_listed_and_described(example: Any, run_cli: Any) -> None:
    [row] = [
        row
        for row in json.loads(run_cli("plugins", "list", "--json", "--kind", "policy").stdout)
        if row["name"] == "shortest"
    ]
    shown = run_cli("plugins", "show", "policy.shortest").stdout

    assert (row["distribution"], row["status"], row["api"]) == ("tpserve-policy-shortest", "available", 1)
    assert "how many of the oldest waiting requests it chooses from" in shown
    assert "an integer of at least 1; default 32" in shown


def test_the_example_plugin_plans(example: Any) -> None:
    plugin = Registry.discover().load("policy", "shortest")
    policy = plugin.factory()(plugin.make_options({"window": "3"}))
    queues = Queues()
    for arrival, length in enumerate([9, 30, 4, 1]):
        message = Generate(arrival, [1] * length, SamplingParams(max_tokens=2, seed=0))
        queues.enqueue(Request.of(message, arrival, SMALL_LIMITS))

    def plan(tokens: int) -> list[int]:
        limits = Limits(tokens, SMALL_LIMITS.slots, SMALL_LIMITS.pages, SMALL_LIMITS.page_size)
        made = policy.plan(View(queues, limits))
        assert breach(made, queues, limits) is None
        return [prefill.uid for prefill in made.prefill]

    assert plan(tokens=100) == [2, 0, 1]
    assert plan(tokens=20) == [2, 0]
    assert plan(tokens=3) == [2]


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
