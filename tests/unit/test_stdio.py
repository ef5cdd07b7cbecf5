"""A server whose standard streams are closed, at its start or later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BANNER = """
import logging
from tpserve.cli import main as cli

def app():
    from tpserve.launch.banner import Banner
    from tpserve.launch.logging import set_up_logging
    from tpserve.step import EngineLimits

    set_up_logging("launch", "info")
    banner = Banner("http://localhost")
    banner.composition([("model", "small", "why")])
    for _ in range(1000):
        logging.info("a line")
    banner.ready(EngineLimits(8, 16, 4, 128, 100, (0,)), 1.0)
    print("went on")

cli.app = app
cli.main()
"""

LISTEN = """
import os, sys
from tpserve.cli import main as cli

def app():
    from tpserve.launch.server import listen

    with listen("127.0.0.1", 0) as sock:
        print("to standard output")
        print("to standard error", file=sys.stderr)
        assert sys.stdin.read() == ""
        os._exit(sock.fileno())

cli.app = app
cli.main()
"""

CHILD = """
import os
import msgspec
from tpserve.launch.process import Child, Start
from tpserve.launch.protocol import ChildSpec

os.close(2)
child = Child(Start(ChildSpec(name="x", place="x", main="os:no_such_role", payload=msgspec.Raw(b"0"))))
assert child.status_fd > 2
while not child.statuses():
    pass
print(child.failure.error)
"""


@pytest.mark.parametrize("sink", ["a pipe without a reader", "/dev/full"])
def test_what_cannot_be_said_is_lost_and_nothing_else(sink: str) -> None:
    if sink == "/dev/full":
        descriptor = os.open(sink, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", BANNER], stdout=subprocess.PIPE, stderr=descriptor, text=True, timeout=60, check=False
    )
    os.close(descriptor)
    assert (done.returncode, done.stdout) == (0, "went on\n")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["plugins", "list"], ["env", "--json"]])
def test_results_that_cannot_be_written_are_told_in_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tpserve", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "error: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    "arguments",
    [
        *(["-m", "tpserve", *arguments] for arguments in (["--version"], ["--help"], ["plugins", "list"])),
        ["-c", "from tpserve.cli import main; main.app = lambda: print('unflushed'); main.main()"],
    ],
)
def test_a_reader_that_has_had_enough_ends_it_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("redirection", ["<&-", "</dev/null >&-", "</dev/null 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_not_taken_for_the_socket(redirection: str) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, LISTEN]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode > 2, done.stderr
    assert "Traceback" not in done.stderr


def test_a_child_starts_where_standard_error_is_closed() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout[:15]) == (0, "AttributeError:"), done.stderr
