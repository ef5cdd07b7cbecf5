"""A plugin's module is imported and checked; whatever is wrong with it ends as a status with a reason."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from tpserve.plugins.discovery import discover
from tpserve.plugins.loading import BadPlugin, load_spec, stated_api

GOOD = """
    from tpserve.api import PolicySpec, hookimpl

    TPSERVE_API = 1

    @hookimpl
    def tpserve_policies():
        return [PolicySpec(name="mine", summary="mine", factory="acme.policy:Mine")]
"""


def entry_for(site: Any, source: str) -> Any:
    site.add("acme", {"policy.mine": "acme.plugin"}, {"acme/__init__.py": "", "acme/plugin.py": source})
    return next(entry for entry in discover() if entry.key == "policy.mine")


def failure(site: Any, source: str) -> tuple[str, str]:
    entry = entry_for(site, source)
    with pytest.raises(BadPlugin) as caught:
        load_spec(entry)
    return caught.value.status.state, caught.value.status.reason


def with_spec(arguments: str, more: str = "") -> str:
    return dedent(GOOD).replace('name="mine", summary="mine", factory="acme.policy:Mine"', arguments) + dedent(more)


def test_a_good_module_gives_its_spec(site: Any) -> None:
    entry = entry_for(site, GOOD)

    assert load_spec(entry).factory == "acme.policy:Mine"
    assert stated_api(entry) == 1


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("raise RuntimeError('no\\nluck')", "acme.plugin: RuntimeError: no luck"),
        ("raise SystemExit('bye')", "acme.plugin: SystemExit: bye"),
        ("import os; os._exit(3)", "acme.plugin: SystemExit: os._exit(3)"),
        ("raise KeyboardInterrupt('stop')", "acme.plugin: KeyboardInterrupt: stop"),
        ("import missing_library", "acme.plugin: ModuleNotFoundError: No module named 'missing_library'"),
    ],
)
def test_an_exception_on_import_is_the_reason(site: Any, statement: str, says: str) -> None:
    assert failure(site, f"TPSERVE_API = 1\n{statement}\n") == ("broken", says)


def test_a_syntax_error_is_the_reason(site: Any) -> None:
    state, reason = failure(site, "TPSERVE_API = 1\ndef (:\n")

    assert state == "broken"
    assert "SyntaxError" in reason
    assert "plugin.py, line 2" in reason


def test_what_a_module_prints_spoils_no_results(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    failure(site, "print('hello')\nTPSERVE_API = 1\nraise RuntimeError\n")
    assert capsys.readouterr() == ("", "hello\n")


def test_a_module_that_does_not_exist_is_broken(site: Any) -> None:
    site.add("acme", {"policy.mine": "acme.plugin"}, {"acme/__init__.py": ""})
    entry = next(entry for entry in discover() if entry.key == "policy.mine")

    with pytest.raises(BadPlugin, match=r"acme\.plugin: ModuleNotFoundError"):
        load_spec(entry)
    assert stated_api(entry) is None


def test_another_api_version_is_told_apart_before_its_import_fails(site: Any) -> None:
    source = "from tpserve.api import SomethingOfVersionSeven\nTPSERVE_API = 7\n"

    assert failure(site, source) == ("incompatible", "written for plugin API 7; this tpserve has version 1")


@pytest.mark.parametrize("line", ["", "TPSERVE_API = int('1')"])
def test_a_module_that_states_no_literal_api_is_incompatible(site: Any, line: str) -> None:
    state, reason = failure(site, GOOD.replace("TPSERVE_API = 1", line))

    assert state == "incompatible"
    assert "states no plugin API" in reason


def test_an_annotated_api_counts(site: Any) -> None:
    assert load_spec(entry_for(site, GOOD.replace("TPSERVE_API = 1", "TPSERVE_API: int = 1"))).name == "mine"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('name="other", summary="x", factory="a:B"', "one spec named 'mine', found: other"),
        ('name="mine", summary="", factory="a:B"', "its summary must be one line"),
        ('name="mine", summary="x", factory="a.B"', "its factory must be 'package.module:Class', found 'a.B'"),
        ('name="mine", summary="x", factory="a:B", probe="c"', "its probe must be 'package.module:function'"),
        ('name="mine", summary="x", factory="a:B", requires=("a >>> 2",)', "its requirement 'a >>> 2' is wrong"),
        ('name="mine", summary=7, factory="a:B"', "its spec is wrong: Expected `str`, got `int` - at `$.summary`"),
        ('name="mine", summary="x", factory="a:B", options=int', "its options must be a subclass of"),
        ('name="mine", summary="x", factory="a:B", options=Needy', "options without a default: size"),
        ('summary="x"', "TypeError: Missing required argument 'name'"),
    ],
)
def test_a_wrong_spec_is_broken(site: Any, arguments: str, says: str) -> None:
    needy = """
        from tpserve.api import Options

        class Needy(Options, frozen=True):
            size: int
    """
    state, reason = failure(site, with_spec(arguments, needy))

    assert state == "broken"
    assert says in reason


def test_a_spec_of_another_kind_is_broken(site: Any) -> None:
    state, reason = failure(site, GOOD.replace("PolicySpec", "SyncSpec"))

    assert (state, reason) == ("broken", "tpserve_policies of acme.plugin must return PolicySpec, found SyncSpec")


def test_a_hook_that_raises_is_broken(site: Any) -> None:
    entry = entry_for(site, GOOD.replace("return [", "raise ValueError('oh'); return ["))
    with pytest.raises(BadPlugin, match="ValueError: oh"):
        load_spec(entry)


@pytest.mark.parametrize(
    ("name", "says"),
    [("tpserve_syncs", "found: none"), ("tpserve_polices", "PluginValidationError: unknown hook 'tpserve_polices'")],
)
def test_a_hook_under_another_name_is_broken(site: Any, name: str, says: str) -> None:
    state, reason = failure(site, GOOD.replace("tpserve_policies", name))

    assert state == "broken"
    assert says in reason
