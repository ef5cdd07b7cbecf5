"""Running a kind's contract on a plugin that is installed, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import util
from pathlib import Path

from tpserve.errors import ConfigError, UnavailablePlugin
from tpserve.plugins.registry import Plugin
from tpserve.values import did_you_mean

__all__ = ["check_contract", "choose_device"]

TESTS = """\
from tpserve.testing.installed import contract_of, package_of

TestPackage = package_of({key!r})
TestContract = contract_of({key!r}, device={device!r})
"""

FLAGS = ("-q", "--tb=short", "--no-header", "--strict-markers", "-p", "no:cacheprovider")
KIT = "tpserve.testing.pytest_plugin"


def check_contract(plugin: Plugin, *, device: str = "cpu", fast: bool = False) -> bool:
    """Test a plugin's package and its contract; pytest's output goes where this process's goes.

    Args:
        plugin: to test.
        device: where tensors are, for the kinds that compute.
        fast: leave out what takes long.

    Returns:
        Whether all tests passed.

    Raises:
        UnavailablePlugin: pytest is not installed.
    """
    if util.find_spec("pytest") is None:
        raise UnavailablePlugin("checking a plugin needs pytest, which is not installed", "pip install pytest")
    with tempfile.TemporaryDirectory(prefix="tpserve-check-") as folder:
        tests = Path(folder, f"test_{plugin.kind}_{plugin.name}.py")
        tests.write_text(TESTS.format(key=plugin.entry.key, device=device))
        command = [sys.executable, "-P", "-m", "pytest", *FLAGS, "-p", KIT, f"--rootdir={folder}", "-c", os.devnull]
        selected = ["-m", "not slow"] if fast else []
        return subprocess.run([*command, *selected, tests], env=_environ(), check=False).returncode == 0


def choose_device(plugin: Plugin, wanted: str) -> str:
    """The torch device to test a plugin on.

    Args:
        plugin: to test.
        wanted: ``cpu``, ``cuda``, or ``auto`` for the first of the two that the plugin offers.

    Raises:
        ConfigError: another word, or a device that the plugin does not offer.
    """
    devices: tuple[str, ...] = getattr(getattr(plugin.spec, "capabilities", None), "devices", ()) or ("cpu", "cuda")
    if wanted not in ("auto", *devices):
        hint = did_you_mean(wanted, ("auto", *devices), what="Devices")
        raise ConfigError(f"--device: {plugin.entry.key} does not offer {wanted!r}", hint)
    return devices[0] if wanted == "auto" else wanted


def _environ() -> dict[str, str]:
    """This process's environment, without what would bring other pytest plugins and flags in."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    return {**environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
