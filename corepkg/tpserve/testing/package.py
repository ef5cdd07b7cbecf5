"""What must be right about any installed plugin, as tests: subclass :class:`PackageContract` and name the plugin.

class TestPackage(PackageContract):
    plugin = "transport.mine"
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import ClassVar

import msgspec
import pytest

from tpserve.api import API_VERSION
from tpserve.plugins.loading import stated_api
from tpserve.plugins.options import describe_options
from tpserve.plugins.registry import INTERFACES, Plugin, Registry
from tpserve.testing.processes import PATIENCE

__all__ = ["PackageContract"]

IMPORT = """
import importlib, json, sys, threading
before = threading.enumerate()
importlib.import_module(sys.argv[1])
imported = [name for name in sys.argv[2:] if name in sys.modules]
print()
print(json.dumps([imported, [thread.name for thread in threading.enumerate() if thread not in before]]), end="")
"""

HEAVY = ("torch", "numpy", "zmq", "pynng", "flashinfer", "triton")


class PackageContract:
    """Subclass it.

    Attributes:
        plugin: the plugin as ``kind.name``; its package is installed.
    """

    plugin: ClassVar[str] = ""

    @pytest.fixture
    def found(self) -> Plugin:
        """The plugin as the registry finds it; what is wrong with the package as a whole shows here."""
        registry = Registry.discover()
        entries = [entry for entry in registry.entries() if entry.key == self.plugin]
        assert entries, f"{self.plugin} is not installed: pip install -e ."
        return registry.describe(entries[0])

    def test_it_states_the_plugin_api(self, found: Plugin) -> None:
        """As a literal, which is read before the module is imported."""
        assert stated_api(found.entry) == API_VERSION

    def test_reading_the_spec_is_light(self, found: Plugin) -> None:
        """Importing the plugin's module imports neither the class nor any large library, and does nothing else."""
        module, unwanted = found.entry.module, [*HEAVY, found.spec.factory.partition(":")[0]]
        command = [sys.executable, "-c", IMPORT, module, *unwanted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        printed, _, seen = done.stdout.rpartition("\n")
        imported, threads = json.loads(seen)
        advice = "'tpserve plugins list' imports it, so it must do no more than state the spec"
        if imported:
            raise AssertionError(f"{module} imports {', '.join(imported)}: {advice}")
        if threads:
            raise AssertionError(f"{module} starts threads on import ({', '.join(threads)}): {advice}")
        if printed:
            raise AssertionError(f"{module} prints {printed[:80]!r} on import: {advice}")

    def test_the_class_implements_the_interface(self, found: Plugin) -> None:
        """It can be imported, derives from the interface of its kind, and leaves nothing abstract."""
        missing: frozenset[str] = getattr(found.factory(), "__abstractmethods__", frozenset())
        if missing:
            interface = INTERFACES[found.kind].__name__
            names = ", ".join(sorted(missing))
            raise AssertionError(f"{found.spec.factory} does not implement {names} of tpserve.api.{interface}")

    def test_the_options_come_back_as_they_went(self, found: Plugin) -> None:
        """Through plain data, and an unknown one is refused."""
        options = found.spec.options
        plain = msgspec.to_builtins(options())
        assert msgspec.convert(plain, options) == options()
        assert found.make_options(plain) == options()
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**plain, "no_such_option": 1}, options)

    def test_every_option_is_described(self, found: Plugin) -> None:
        """In the ``Attributes:`` section of the options' docstring, for ``tpserve plugins show``."""
        undescribed = [option.name for option in describe_options(found.spec.options) if not option.doc]
        if undescribed:
            raise AssertionError(
                f"the docstring of {found.spec.options.__name__} does not describe {', '.join(undescribed)}: give it a"
                " section 'Attributes:', and there a line 'NAME: what it means' for each"
            )
