"""Discovery reads metadata only, and says what is wrong with it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tpserve.plugins.discovery import discover

EVERY_PLUGIN_MODULE = [
    "tpserve_transport_zmq",
    "tpserve_transport_nng",
    "tpserve_attn_triton",
    "tpserve.plugins.builtin",
]


def problems(key: str) -> list[tuple[str, str]]:
    return [(e.problem.state, e.problem.reason) for e in discover() if e.key == key and e.problem is not None]


def test_the_parts_of_the_workspace_are_found_in_the_order_of_kinds() -> None:
    keys = [entry.key for entry in discover()]

    assert {"transport.inproc", "transport.zmq", "transport.nng", "policy.fcfs", "attention.triton"} <= set(keys)
    assert keys.index("transport.zmq") < keys.index("sync.gloo") < keys.index("policy.fcfs") < keys.index("comm.gloo")


def test_nothing_is_imported() -> None:
    code = (
        "import sys; from tpserve.plugins.registry import Registry; Registry.discover();"
        f"print([name for name in sys.modules if name.startswith(tuple({EVERY_PLUGIN_MODULE}))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"


def test_an_entry_knows_its_distribution(site: Any) -> None:
    site.add("acme-policy", {"policy.acme": "acme.plugin"}, version="2.5")

    [entry] = [entry for entry in discover() if entry.name == "acme"]

    assert (entry.kind, entry.module, entry.distribution, entry.version) == (
        "policy",
        "acme.plugin",
        "acme-policy",
        "2.5",
    )
    assert entry.problem is None


def test_two_providers_of_one_name_are_a_conflict_that_names_both(site: Any) -> None:
    site.add("acme", {"policy.mine": "acme.plugin"})
    site.add("zenith", {"policy.mine": "zenith.plugin"}, version="3")

    assert problems("policy.mine") == [("conflict", "provided by acme 1.0 and by zenith 3")] * 2


def test_an_unknown_kind_is_broken_and_lists_those_that_exist(site: Any) -> None:
    site.add("acme", {"polcy.mine": "acme.plugin"})

    [entry] = [entry for entry in discover() if entry.kind == "polcy"]

    assert entry.problem is not None
    assert entry.problem.reason == "there is no kind 'polcy'"
    assert "Did you mean 'policy'?" in entry.problem.hint


def test_a_name_without_a_kind_or_of_a_bad_form_is_broken(site: Any) -> None:
    site.add("acme", {"mine": "acme.plugin", "policy.Mine": "acme.plugin", "policy.my__own": "acme.plugin"})

    for key in ("mine", "policy.Mine", "policy.my__own"):
        assert problems(key) == [("broken", f"the entry point {key!r} is not named kind.name")]


def test_a_word_that_flags_know_is_no_name(site: Any) -> None:
    site.add("acme", {"policy.auto": "acme.plugin"})

    assert problems("policy.auto") == [("broken", "'auto' cannot be a plugin's name: flags give it another meaning")]


def test_an_entry_point_must_name_a_module(site: Any) -> None:
    site.add("acme", {"policy.mine": "acme.plugin:Class"})

    assert problems("policy.mine") == [
        ("broken", "the entry point 'policy.mine' must name a module, found 'acme.plugin:Class'")
    ]


def test_unreadable_entry_points_are_listed_and_hide_nothing_else(site: Any) -> None:
    site.add("acme", {})
    (site.path / "acme-1.0.dist-info" / "entry_points.txt").write_text("[tpserve]\nthis line has no equals sign\n")

    entries = discover()

    assert any(entry.distribution == "acme" and entry.problem is not None for entry in entries)
    assert any(entry.key == "transport.zmq" for entry in entries)


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA"])
def test_metadata_that_is_not_utf_8_is_listed_and_hides_nothing_else(site: Any, file: str) -> None:
    site.add("acme", {"policy.mine": "acme.plugin"})
    path = site.path / "acme-1.0.dist-info" / file
    path.write_bytes(path.read_bytes() + b"\n# \xff\n")

    entries = discover()

    assert any("cannot be read" in entry.problem.reason for entry in entries if entry.problem)
    assert any(entry.key == "transport.zmq" for entry in entries)


def test_a_distribution_without_metadata_hides_nothing_else(site: Any) -> None:
    site.add("acme", {"policy.mine": "acme.plugin"})
    (site.path / "acme-1.0.dist-info" / "METADATA").unlink()

    entries = {entry.key: entry for entry in discover()}

    assert "transport.zmq" in entries
    assert entries["policy.mine"].distribution == "unknown"


def test_the_first_of_two_copies_of_a_distribution_counts(site: Any) -> None:
    site.add("tpserve-transport-zmq", {"transport.zmq": "other.plugin"}, version="9.9")

    found = [entry for entry in discover() if entry.key == "transport.zmq"]

    assert [(entry.version, entry.problem) for entry in found] == [("9.9", None)]
