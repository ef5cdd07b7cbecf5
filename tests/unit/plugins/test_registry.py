"""Choosing a plugin: every way in which it cannot be used is its own error, with a reason and a hint."""

from __future__ import annotations

from typing import Any

import pytest

from tpserve.errors import ConfigError, PluginConflict, PluginError, UnavailablePlugin, UnknownPlugin
from tpserve.plugins.registry import Plugin, Registry

PLUGIN = """
    from typing import Annotated
    from msgspec import Meta
    from tpserve.api import Options, PolicySpec, hookimpl

    TPSERVE_API = 1

    class AcmeOptions(Options, frozen=True, kw_only=True):
        size: Annotated[int, Meta(ge=1)] = 4
        share: float = 0.5
        label: str = ""
        eager: bool = False
        sizes: tuple[int, ...] = ()

        def __post_init__(self):
            if self.eager and self.size > 100:
                raise ValueError("eager needs a size of at most 100")

    def spec(name, factory, **more):
        return PolicySpec(name=name, summary=name, factory=factory, options=AcmeOptions, **more)

    @hookimpl
    def tpserve_policies():
        return [
            spec("good", "acme.policy:Good"),
            spec("odd", "acme.policy:Odd"),
            spec("absent", "acme.policy:Absent"),
            spec("heavy", "acme.heavy:Heavy"),
            spec("needy", "acme.policy:Good", requires=("no-such-thing>=1",)),
            spec("refusing", "acme.policy:Good", probe="acme.plugin:probe"),
        ]

    def probe():
        return "wrong phase of the moon"
"""
POLICY = """
    from tpserve.api import Plan, Policy

    class Good(Policy):
        def plan(self, view):
            return Plan()

    class Odd:
        pass
"""
NAMES = ("good", "odd", "absent", "heavy", "needy", "refusing")


@pytest.fixture
def registry(site: Any) -> Registry:
    files = {
        "acme/__init__.py": "",
        "acme/plugin.py": PLUGIN,
        "acme/policy.py": POLICY,
        "acme/heavy.py": "raise AssertionError('no driver')",
    }
    site.add("acme", {f"policy.{name}": "acme.plugin" for name in NAMES}, files)
    return Registry.discover()


@pytest.fixture
def good(registry: Registry) -> Plugin:
    return registry.load("policy", "good")


def test_a_plugin_makes_its_part(good: Plugin) -> None:
    part = good.factory()(good.make_options({"size": "8"}))

    assert type(part).__name__ == "Good"
    assert part.options.size == 8


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [
        ("8", "size", 8),
        (8, "size", 8),
        ("0.25", "share", 0.25),
        (1, "share", 1.0),
        ("true", "eager", True),
        (True, "eager", True),
        ("8", "label", "8"),
        ("[1, 2]", "sizes", (1, 2)),
        ([1, "2"], "sizes", (1, 2)),
    ],
)
def test_options_are_read_from_text_and_from_yaml_values(good: Plugin, written: Any, field: str, value: Any) -> None:
    assert getattr(good.make_options({field: written}), field) == value


def test_options_keep_their_defaults(good: Plugin) -> None:
    assert good.make_options({}) == good.spec.options()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"size": "big"}, "option policy.good.size: expected an integer of at least 1, found 'big'"),
        ({"size": 0}, "option policy.good.size: expected an integer of at least 1, found 0"),
        ({"sizes": "1"}, "option policy.good.sizes: expected a list (each an integer), found '1'"),
        ({"sise": 1}, "policy.good has no option 'sise'. Did you mean 'size'? Its options: size, share, label"),
        ({"eager": True, "size": 101}, "options of policy.good: eager needs a size of at most 100"),
    ],
)
def test_wrong_options_name_plugin_and_field(good: Plugin, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        good.make_options(values)
    assert str(caught.value).startswith(says)


def test_an_unknown_name_lists_those_that_exist(registry: Registry) -> None:
    with pytest.raises(UnknownPlugin) as caught:
        registry.load("policy", "fcsf")
    assert caught.value.message == "there is no policy plugin named 'fcsf'"
    assert caught.value.hint.startswith("Did you mean 'fcfs'? Available: ")
    assert "heavy" in caught.value.hint


def test_a_missing_requirement_is_said_with_the_command_that_mends_it(registry: Registry) -> None:
    with pytest.raises(UnavailablePlugin) as caught:
        registry.load("policy", "needy")
    assert caught.value.message == "policy.needy is unavailable: needs no-such-thing>=1, which is not installed"
    assert caught.value.hint == "pip install 'no-such-thing>=1'"


def test_a_probe_decides_unless_it_is_skipped(registry: Registry) -> None:
    with pytest.raises(UnavailablePlugin, match=r"policy\.refusing is unavailable: wrong phase of the moon") as caught:
        registry.load("policy", "refusing")
    assert caught.value.hint == "tpserve plugins list --kind policy shows what else there is"
    assert registry.load("policy", "refusing", probe=False).name == "refusing"


def test_two_providers_are_a_conflict_and_harm_nothing_else(site: Any, registry: Registry) -> None:
    site.add("zenith", {"policy.good": "zenith.plugin"})
    registry = Registry.discover()

    with pytest.raises(PluginConflict, match=r"policy\.good is ambiguous: provided by acme 1\.0 and by zenith 1\.0"):
        registry.load("policy", "good")
    assert registry.load("policy", "fcfs").name == "fcfs"


def test_a_broken_plugin_is_an_error_only_when_it_is_chosen(site: Any) -> None:
    site.add("acme", {"policy.bad": "bad.plugin"}, {"bad/__init__.py": "", "bad/plugin.py": "TPSERVE_API = 1\n1/0"})
    registry = Registry.discover()

    with pytest.raises(PluginError, match=r"policy\.bad is broken: bad\.plugin: ZeroDivisionError"):
        registry.load("policy", "bad")
    assert registry.load("policy", "fcfs").name == "fcfs"


def test_a_wrong_spec_is_said_to_be_whose_fault_it_is(site: Any) -> None:
    plugin = PLUGIN.replace("options=AcmeOptions", "options=int")
    site.add("acme", {"policy.good": "bad.plugin"}, {"bad/__init__.py": "", "bad/plugin.py": plugin})

    with pytest.raises(PluginError, match=r"policy\.good is broken: its options must be a subclass") as caught:
        Registry.discover().load("policy", "good")
    assert caught.value.hint == "That is a fault of acme 1.0"


@pytest.mark.parametrize("name", ["odd", "absent"])
def test_a_factory_must_be_of_its_kind(registry: Registry, name: str) -> None:
    with pytest.raises(PluginError, match=r"must be a subclass of tpserve\.api\.Policy.* fault of acme 1\.0"):
        registry.load("policy", name).factory()


def test_a_factory_that_cannot_be_imported_is_unavailable(registry: Registry) -> None:
    with pytest.raises(UnavailablePlugin, match=r"importing acme\.heavy failed: AssertionError: no driver") as caught:
        registry.load("policy", "heavy").factory()
    assert caught.value.hint == "tpserve plugins list --kind policy shows what else there is"


def test_statuses_come_in_order_and_raise_nothing(registry: Registry) -> None:
    entries = [entry for entry in registry.entries("policy") if entry.name in NAMES]
    states = dict(zip([entry.name for entry in entries], registry.statuses(entries), strict=True))

    assert {name: status.state for name, status in states.items()} == {
        "absent": "available",
        "good": "available",
        "heavy": "available",
        "needy": "unavailable",
        "odd": "available",
        "refusing": "unavailable",
    }


def test_the_parts_that_tpserve_brings_are_available() -> None:
    registry = Registry.discover()
    entries = [entry for entry in registry.entries() if entry.distribution == "tpserve"]

    states = {entry.key: status.state for entry, status in zip(entries, registry.statuses(entries), strict=True)}
    elsewhere = {"comm.nccl", "comm.peer", "attention.cpu", "ops.cpu"}  # which need a CUDA device or a C++ compiler
    assert {state for key, state in states.items() if key not in elsewhere} == {"available"}
    assert {states[key] for key in elsewhere} <= {"available", "unavailable"}
    assert {entry.kind for entry in entries} == {"transport", "sync", "policy", "attention", "ops", "comm"}


def test_what_is_available_can_be_imported() -> None:
    registry = Registry.discover()
    entries = [entry for entry in registry.entries() if entry.distribution.startswith("tpserve")]
    available = [e for e, s in zip(entries, registry.statuses(entries), strict=True) if s.state == "available"]

    assert len(available) >= 6
    for entry in available:
        assert registry.describe(entry).factory().__name__
