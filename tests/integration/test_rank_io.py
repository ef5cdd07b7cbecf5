"""The example of ranks that do nothing but IO, with each transport and sync."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "rank_io.py"


@pytest.mark.parametrize(("transport", "ranks"), [("zmq", 2), ("nng", 2), ("zmq", 3), ("nng", 1)])
def test_every_rank_sees_the_same_messages_in_the_same_rounds(transport, ranks):
    command = [sys.executable, EXAMPLE, "--transport", transport, "--ranks", str(ranks), "--messages", "40"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    shown = dict(re.fullmatch(r"rank (\d+): (.*)", line).groups() for line in ran.stdout.splitlines())
    assert sorted(shown) == [str(rank) for rank in range(ranks)]
    assert len(set(shown.values())) == 1
    uids, _, _digest = shown["0"].partition(" (")
    assert uids.replace("|", " ").split() == [str(uid) for uid in range(40)]
    assert "|" in uids
