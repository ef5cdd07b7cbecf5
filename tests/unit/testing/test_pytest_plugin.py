"""The kit's pytest plugin: its guard fails a test that leaves something behind, and one that hangs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from tpserve.testing import pytest_plugin

TIDY = {
    "a_process_that_ends": "subprocess.run([sys.executable, '-c', ''])",
    "a_socket_that_nobody_holds": "socket.socket()",
    "a_thread_that_ends_soon": "threading.Thread(target=time.sleep, args=(0.2,)).start()",
    "shared_memory": "s = shared_memory.SharedMemory(create=True, size=1); s.close(); s.unlink()",
    "a_file_in_tmp_path": "request.getfixturevalue('tmp_path').joinpath('file').touch()",
    "light": "assert not {'torch', 'numpy', 'zmq'} & set(sys.modules)",
}
UNTIDY = {
    "process": ("open('pid', 'w').write(str(subprocess.Popen(['sleep', '987']).pid))", r"process \d+ \(sleep 987\)"),
    "thread": (
        "threading.Thread(target=time.sleep, args=(30,), daemon=True, name='stray').start()",
        "thread stray",
    ),
    "pipe": ("os.pipe()", r"descriptor \d+ \(pipe:.*\)\ndescriptor \d+ \(pipe:.*\)"),
    "socket": ("socket.socket().detach()", r"descriptor \d+ \(socket:.*\)"),
    "file": ("os.open('/', os.O_RDONLY)", r"descriptor \d+ \(/\)"),
    "temporary_file": ("tempfile.NamedTemporaryFile(prefix='mine', delete=False).close()", r"file mine\w+"),
}

MODULE = """
import os, socket, subprocess, sys, tempfile, threading, time
from multiprocessing import shared_memory
import pytest
from tpserve.testing import leftovers

leftovers.GRACE = 0.5

"""
CASE = """
@pytest.mark.slow
def test_{name}(tpserve_guard, request):
    {body}
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pytest says of guarded tests with these bodies; empty of one that passes."""
    folder = tmp_path_factory.mktemp("guarded")
    bodies = {**TIDY, **{name: body for name, (body, _) in UNTIDY.items()}, "hang": "time.sleep(100)"}
    cases = [CASE.format(name=name, body=body) for name, body in bodies.items()]
    (folder / "test_guarded.py").write_text(MODULE + "".join(cases))
    flags = ["-q", "-p", "no:cacheprovider", "--strict-markers", "--tpserve-limit", "1", "--junitxml", "outcomes.xml"]
    subprocess.run([sys.executable, "-m", "pytest", *flags], cwd=folder, timeout=120, check=False)
    assert not psutil.pid_exists(int((folder / "pid").read_text())), "what is left is killed"
    return {
        case.attrib["name"].removeprefix("test_"): "".join(problem.text or "" for problem in case)
        for case in ElementTree.parse(folder / "outcomes.xml").iter("testcase")
    }


def test_asserts_of_all_contracts_are_rewritten() -> None:
    """So that a failure shows both sides."""
    modules = Path(pytest_plugin.__file__).parent.glob("*.py")
    assert {module.stem for module in modules if "    def test_" in module.read_text()} <= set(pytest_plugin.CONTRACTS)


@pytest.mark.parametrize("name", TIDY)
def test_a_tidy_test_passes(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == ""


@pytest.mark.parametrize("name", UNTIDY)
def test_what_is_left_is_an_error(outcomes: dict[str, str], name: str) -> None:
    assert re.fullmatch(f"the test leaves behind:\n{UNTIDY[name][1]}", outcomes[name])


def test_a_test_that_hangs_is_ended(outcomes: dict[str, str]) -> None:
    assert "the test takes more than 1 s" in outcomes["hang"]
