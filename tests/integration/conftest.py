"""How tests that start servers run beside each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

LONGEST = ("test_parity.py", "test_same_tokens.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that it does not run on when everything else has ended."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Servers compute with one thread: threads that wait for each other spin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPSERVE_THREADS", "1")
        yield
