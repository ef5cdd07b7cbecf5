"""Whether a test of the kit tells what keeps its promise from what breaks it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tpserve.testing import lab

__all__ = ["finds", "passes"]


def finds(faulty: Path, fault: str, test: str, patience: float, *impatient: ModuleType) -> bool:
    """Whether one test passes on the sound part that a module has, and fails on one with a fault.

    Many faults show when patience is at an end, so these modules have less of it: but not with the sound part, which a
    busy machine may keep waiting. On such a machine a fault that spins may get little of a core.
    """
    if not _passes_sound(faulty, test):
        return False
    with pytest.MonkeyPatch.context() as patch:
        for module in impatient:
            patch.setattr(module, "PATIENCE", patience)
        patch.setattr(lab, "RESTLESS", 0.1)
        return not passes(faulty, fault, test)


@cache
def _passes_sound(faulty: Path, test: str) -> bool:
    return passes(faulty, "Sound", test)


def passes(faulty: Path, fault: str, test: str, tests: str = "TestFaulty") -> bool:
    """Run one test of the contract in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT", fault)
        code = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", f"{faulty}::{tests}::{test}"])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), code
    return code == pytest.ExitCode.OK
