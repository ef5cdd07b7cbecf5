"""Without a CUDA device each module here is one skipped test, where a thousand would say the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


class Unusable(pytest.Module):
    """A module whose tests cannot run here."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        """None."""
        pytest.skip("needs a CUDA device", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Do not even import it."""
    return None if torch.cuda.is_available() else Unusable.from_parent(parent, path=module_path)
