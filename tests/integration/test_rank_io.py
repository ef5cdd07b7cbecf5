"""The example of ranks that do nothing but IO, with each transport between processes and each sync."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpserve.plugins.registry import Registry

OURS = ("tpserve", "tpserve-transport-zmq", "tpserve-transport-nng")
CASES = [("zmq", "shm", 2), ("nng", "inband", 2), ("gloo", "gloo", 2), ("zmq", "inband", 3), ("nng", "shm", 1)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "rank_io.py"


def test_no_transport_and_no_sync_is_left_out():
    """Third-party ones that happen to be installed have tests of their own."""
    ours = [entry for entry in Registry.discover().entries() if entry.distribution in OURS]
    transports = {entry.name for entry in ours if entry.kind == "transport"} - {"inproc"}
    assert transports == {transport for transport, _, ranks in CASES if ranks > 1}
    assert {entry.name for entry in ours if entry.kind == "sync"} == {sync for _, sync, ranks in CASES if ranks > 1}


@pytest.mark.parametrize(("transport", "sync", "ranks"), CASES)
def test_every_rank_sees_the_same_messages_in_the_same_rounds(transport, sync, ranks):
    flags = ["--transport", transport, "--sync", sync, "--ranks", str(ranks), "--messages", "40"]
    command = [sys.executable, EXAMPLE, *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    shown = dict(re.fullmatch(r"rank (\d+): (.*)", line).groups() for line in ran.stdout.splitlines())
    assert sorted(shown) == [str(rank) for rank in range(ranks)]
    assert len(set(shown.values())) == 1
    uids, _, digest = shown["0"].partition(" (")
    assert re.fullmatch(r"digest 0x[0-9a-f]+\)", digest)
    assert uids.replace("|", " ").split() == [str(uid) for uid in range(40)]
    assert "|" in uids


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--transport", "inproc"], "error: transport.inproc works inside one process only"),
        (
            ["--transport", "gloo", "--pipe-transport", "inproc"],
            "error: transport.inproc works inside one process only",
        ),
        (["--transport", "gloo", "--pipe-transport", "gloo"], "error: transport.gloo has no pipes"),
        (["--sync", "nope"], "error: there is no sync plugin named 'nope'"),
        (["--ranks", "0"], "error: --ranks: expected 1 to 64, found 0"),
        (["--ranks", "-1"], "error: --ranks: expected 1 to 64, found -1"),
        (["--ranks", "10000000"], "error: --ranks: expected 1 to 64, found 10000000"),
        (["--transport", "gloos"], "error: there is no transport plugin named 'gloos'. Did you mean 'gloo'?"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(flags, says):
    ran = subprocess.run([sys.executable, EXAMPLE, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(says)
    assert ran.stderr.count("\n") == 1
