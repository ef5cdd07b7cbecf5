"""Tests that start servers run beside each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Servers compute with one thread: threads that wait for each other spin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPSERVE_THREADS", "1")
        yield
