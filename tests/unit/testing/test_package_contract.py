"""The package contract finds what is wrong with a package, and says so in words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpserve.api import Options, Policy
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.testing.package import PackageContract


class Undescribed(Options, frozen=True):
    """Has two, of which one is described.

    Attributes:
        patience: how long.
    """

    patience: int = 1
    window: int = 2


class Described(Options, frozen=True):
    """Has one.

    Attributes:
        patience: how long.
    """

    patience: int = 1


class Halfway(Policy):
    """Has no plan."""


def plugin(cls: type = FcfsPolicy, options: type[Options] = Described, module: str = "planted") -> Any:
    spec = SimpleNamespace(factory="planted_class:Mine", options=options)
    return SimpleNamespace(kind="policy", entry=SimpleNamespace(module=module), spec=spec, factory=lambda: cls)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", ""),
        ("import numpy", "planted imports numpy: "),
        ("import planted_class", "planted imports planted_class: "),
        ("print('hello')", r"planted prints 'hello\\n' on import: "),
        (
            "import threading; threading.Thread(target=threading.Event().wait, name='mine', daemon=True).start()",
            r"planted starts threads on import \(mine\): ",
        ),
    ],
)
def test_what_a_light_module_must_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str) -> None:
    (tmp_path / "planted.py").write_text(body)
    (tmp_path / "planted_class.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if not says:
        PackageContract().test_reading_the_spec_is_light(plugin())
        return
    with pytest.raises(AssertionError, match=says):
        PackageContract().test_reading_the_spec_is_light(plugin())


def test_a_class_that_is_not_complete() -> None:
    PackageContract().test_the_class_implements_the_interface(plugin())
    with pytest.raises(AssertionError, match=r"planted_class:Mine does not implement plan of tpserve\.api\.Policy"):
        PackageContract().test_the_class_implements_the_interface(plugin(Halfway))


def test_an_option_that_nobody_describes() -> None:
    PackageContract().test_every_option_is_described(plugin())
    with pytest.raises(AssertionError, match="the docstring of Undescribed does not describe window: give it"):
        PackageContract().test_every_option_is_described(plugin(options=Undescribed))
