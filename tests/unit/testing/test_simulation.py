"""The simulator: it finds nothing wrong, meets what it is there to meet, and finds every bug that is planted."""

import subprocess
import sys
from collections import Counter

import pytest
from tests.unit.testing.planted import BUGS, plant

from tpserve.testing.sim import Failure, Simulation
from tpserve.testing.sim.__main__ import main

SEEDS = 160
MET = {
    *("abort: waiting", "abort: under way", "abort: mid-prompt", "abort: decoding", "abort: before or after"),
    *("evictions", "retraction", "cached tokens", "another generation", "noticed: stop"),
    *("noticed: plan", "noticed: pages", "noticed: retraction"),
}
"""What the seeds must hold to be worth anything, and faults of most kinds besides."""


BADLY_PLANTED = AttributeError, NameError, TypeError


def run(seeds):
    seen = Counter()
    for seed in range(seeds):
        simulation = Simulation(seed)
        simulation.run()
        seen += simulation.seen
    return seen


@pytest.mark.slow
def test_nothing_is_wrong_within_a_fixed_budget():
    seen = run(SEEDS)
    assert set(seen) >= MET
    assert len([name for name in seen if name.startswith("noticed: ")]) >= 9, seen


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, monkeypatch):
    seeds = plant(name, monkeypatch)
    with pytest.raises(Failure) as found:
        run(seeds)
    assert not isinstance(found.value.__cause__, BADLY_PLANTED), "the bug does not fit the code any more"


def test_a_seed_decides_everything():
    once, again = Simulation(7), Simulation(7)
    once.run()
    again.run()
    assert (once.rounds, once.seen, once.clients.answered) == (again.rounds, again.seen, again.clients.answered)


def simulate(*arguments, code="from tpserve.testing.sim.__main__ import main; sys.exit(main())"):
    command = [sys.executable, "-c", f"import sys; {code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_says_how_fast_it_is():
    done = simulate("--seeds", "3:6", "-v")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("3 seeds, ")
    assert "a minute" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--seeds", "abc"], "argument --seeds: 'abc' is not A:B, two numbers of which either may be left out"),
        (["--seeds", "7"], "argument --seeds: '7' is not A:B, two numbers of which either may be left out"),
        (["--seeds", "5:5"], "argument --seeds: '5:5' holds no seed"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--minutes", "soon"], "argument --minutes: 'soon' is not a number larger than 0"),
        (["--rounds", "-3"], "argument --rounds: '-3' is not a number larger than 0"),
        (["--seed", "1", "--seeds", "1:2"], "argument --seeds: not allowed with argument --seed"),
        (["--faster"], "unrecognized arguments: --faster"),
    ],
)
def test_a_bad_flag_ends_with_exit_code_2_and_one_line(flags, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sim", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {says}; python -m tpserve.testing.sim --help says more\n"


def test_the_default_is_all_seeds(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sim", "--rounds", "1"])
    assert main() == 0


def test_the_command_says_how_a_failure_is_repeated():
    code = """
from tpserve.kv.allocator import PageAllocator
PageAllocator.free = lambda self, pages: None
from tpserve.testing.sim.__main__ import main
sys.exit(main())"""
    done = simulate("--seeds", "5:50", code=code)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("repeat it: python -m tpserve.testing.sim --seed ")
    again = simulate("--seed", last.split()[-1], code=code)
    assert again.returncode == 1
    assert again.stderr.splitlines()[-2:] == done.stderr.splitlines()[-2:]
