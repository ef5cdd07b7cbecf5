"""Servers here compute with one thread: tests run beside each other, and threads that wait for each other spin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPSERVE_THREADS", "1")
        yield
