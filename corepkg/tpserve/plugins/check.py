"""Running a kind's contract on a plugin that is installed, in a pytest of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import util
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from tpserve.errors import ConfigError, UnavailablePlugin
from tpserve.plugins.registry import Plugin
from tpserve.values import did_you_mean

__all__ = ["Checked", "check_contract", "choose_device"]

TESTS = """\
import pytest
from tpserve.testing.installed import contract_of, package_of

pytestmark = pytest.mark.usefixtures("tpserve_limit")
TestPackage = package_of({key!r})
TestContract = contract_of({key!r}, device={device!r})
"""

FLAGS = ("-q", "--tb=short", "--no-header", "--strict-markers", "-p", "no:cacheprovider")
KIT = "tpserve.testing.pytest_plugin"

PATIENCE = 10.0, 60.0
"""Seconds that a test waits for what should come at once: a third of its limit, but no less and no more than these."""

PATIENCE_VARIABLE = "TPSERVE_TESTING_PATIENCE"
"""Where the contracts' processes read it."""

GRACE = 10.0
"""Seconds that pytest has to clean up after itself when it is interrupted."""


class Checked(msgspec.Struct, frozen=True):
    """What a contract's tests found.

    Attributes:
        passed: none failed.
        skipped: how many were skipped, by the reason.
    """

    passed: bool
    skipped: dict[str, int]


def check_contract(
    plugin: Plugin, *, device: str = "cpu", fast: bool = False, limit: float = 300.0, failures: int = 0
) -> Checked:
    """Test a plugin's package and its contract; pytest's output goes where this process's goes.

    A SIGTERM that comes meanwhile ends this process with SystemExit, and leaves nothing behind.

    Args:
        plugin: to test.
        device: where tensors are, for the kinds that compute.
        fast: leave out what takes long.
        limit: seconds after which a test fails.
        failures: stop after so many tests have failed; 0: go on.

    Raises:
        UnavailablePlugin: pytest is not installed.
    """
    if util.find_spec("pytest") is None:
        raise UnavailablePlugin("checking a plugin needs pytest, which is not installed", "pip install pytest")
    with _terminable(), tempfile.TemporaryDirectory(prefix="tpserve-check-") as folder:
        tests = Path(folder, f"test_{plugin.kind}_{plugin.name}.py")
        tests.write_text(TESTS.format(key=plugin.entry.key, device=device))
        command = [sys.executable, "-P", "-m", "pytest", *FLAGS, "-p", KIT, f"--rootdir={folder}", "-c", os.devnull]
        report = Path(folder, "report.xml")
        command += [
            f"--junitxml={report}",
            f"--tpserve-limit={limit:g}",
            f"--maxfail={failures}",
            *(["-m", "not slow"] if fast else []),
        ]
        environ = {"TMPDIR": folder, PATIENCE_VARIABLE: f"{min(max(limit / 3, PATIENCE[0]), PATIENCE[1]):g}"}
        passed = _run([*command, str(tests)], environ) == 0
        return Checked(passed, _skipped(report))


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


def _skipped(report: Path) -> dict[str, int]:
    """Why tests were skipped, and how many, from pytest's report; nothing if it did not come to write one."""
    if not report.exists():
        return {}
    skips = ElementTree.parse(report).iter("skipped")  # noqa: S314 - it is our own
    return dict(Counter(skip.get("message", "") for skip in skips).most_common())


@contextmanager
def _terminable() -> Iterator[None]:
    """Take a SIGTERM for a wish to leave in good order."""
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(command: list[str], environ: dict[str, str]) -> int:
    """Run pytest; whatever ends this early, pytest and what it has started end first, and clean up if they can."""
    with subprocess.Popen(command, env={**_environ(), **environ}, process_group=0) as process:
        try:
            return process.wait()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _environ() -> dict[str, str]:
    """This process's environment, without what would bring other pytest plugins and flags in."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    return {**environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
