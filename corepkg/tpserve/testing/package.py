"""What must be right about any installed plugin, as tests: subclass :class:`PackageContract` and name the plugin.

class TestPackage(PackageContract):
    plugin = "transport.mine"
"""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import msgspec
import pytest

from tpserve.api import API_VERSION
from tpserve.plugins.loading import stated_api
from tpserve.plugins.options import describe_options
from tpserve.plugins.registry import Plugin, Registry
from tpserve.testing.processes import PATIENCE

__all__ = ["PackageContract"]

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
        """Importing the plugin's module imports neither the class nor any large library."""
        unwanted = [*HEAVY, found.spec.factory.partition(":")[0]]
        code = f"import sys, {found.entry.module}; print(*[name for name in {unwanted!r} if name in sys.modules])"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        assert done.stdout.split() == [], f"importing {found.entry.module} imports these"

    def test_the_class_implements_the_interface(self, found: Plugin) -> None:
        """It can be imported, derives from the interface of its kind, and leaves nothing abstract."""
        missing: frozenset[str] = getattr(found.factory(), "__abstractmethods__", frozenset())
        assert sorted(missing) == []

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
        assert [option.name for option in describe_options(found.spec.options) if not option.doc] == []
