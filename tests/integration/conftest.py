"""Tests that start servers run beside each other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpserve.testing.models import make_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Servers compute with one thread: threads that wait for each other spin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPSERVE_THREADS", "1")
        yield


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A base of run directories, short enough for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="tp") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with three KV heads."""
    return make_model(tmp_path_factory.mktemp("models") / "small", "llama")
