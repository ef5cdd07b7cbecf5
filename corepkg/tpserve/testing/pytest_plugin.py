"""What the contract tests need of pytest; installed with tpserve, pytest finds it by itself.

The fixture ``tpserve_limit`` fails a test that hangs. ``tpserve_guard``, which the contracts of links use, does so too,
and fails one that leaves processes, threads, descriptors or temporary files behind. It collects garbage after each, and
``tpserve_imports`` keeps that short. The marker ``slow`` is on what takes long, for ``-m 'not slow'``.

Every pytest in an environment that has tpserve imports this module: so it imports nothing large.
"""

from __future__ import annotations

import gc
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

__all__ = ["pytest_addoption", "pytest_configure", "tpserve_guard", "tpserve_imports", "tpserve_limit"]

AGAIN = 30.0
"""Seconds after which a test that was failed is interrupted once more: what hangs may hang when it is closed, too."""

CONTRACTS = (
    "attention",
    "comm",
    "doors",
    "draws",
    "fanout",
    "lab",
    "leaving",
    "links",
    "ops",
    "package",
    "pipes",
    "policy",
    "queues",
    "rounds",
    "streams",
    "sync",
    "sync_group",
    "transport",
)

pytest.register_assert_rewrite(*(f"tpserve.testing.{name}" for name in CONTRACTS))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the time limit."""
    group = parser.getgroup("tpserve", "contract tests of tpserve")
    group.addoption(
        "--tpserve-limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="a contract test that takes longer hangs (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    config.addinivalue_line("markers", "slow: takes long")


@pytest.fixture(scope="session")
def tpserve_imports() -> Iterator[None]:
    """Keep what was imported out of all collections: with torch one takes 0.3 s."""
    if gc.get_freeze_count():  # somebody else does, as the pytest around this one
        yield
        return
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def tpserve_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it hangs."""
    with _limit(request.config.getoption("--tpserve-limit")):
        yield


@pytest.fixture
def tpserve_guard(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    tpserve_imports: None,
) -> Iterator[None]:
    """Fail the test if it hangs, or leaves something behind; processes that are left are killed."""
    from tpserve.testing.leftovers import Belongings

    tmp_path_factory.getbasetemp()  # pytest makes it where temporary files are when it is first asked for
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        before = Belongings(Path(folder))
        with _limit(request.config.getoption("--tpserve-limit")):
            yield
        left = before.left()
    if left:
        pytest.fail("the test leaves behind:\n" + "\n".join(left), pytrace=False)


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer, unless somebody else uses the alarm clock."""
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def hang(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"the test takes more than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds, max(seconds, AGAIN))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
