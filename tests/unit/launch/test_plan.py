from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.sample import NONE, TWO

from tpserve.config import ServeConfig
from tpserve.launch.devices import Accelerators
from tpserve.launch.plan import Plan, _may_take_kernels
from tpserve.testing.models import make_model


@pytest.mark.parametrize(
    ("settings", "accelerators", "expected"),
    [
        ({}, NONE, True),
        ({"ops": "torch"}, NONE, True),
        ({"attn": "torch", "ops": "cpu"}, NONE, True),
        ({"attn": "torch", "ops": "torch"}, NONE, False),
        ({}, TWO, False),
        ({"device": "cpu"}, TWO, True),
    ],
)
def test_kernels_are_compiled_only_where_they_may_be_chosen(
    settings: dict[str, Any], accelerators: Accelerators, expected: bool
) -> None:
    assert _may_take_kernels(ServeConfig(**settings), accelerators) is expected


@pytest.mark.parametrize("action", ["exit 1", "echo v1"])
def test_what_serves_instead_of_kernels_that_cannot_be_compiled_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """By a compiler that fails at once, and by one that makes nothing."""
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{action}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / "cache"))
    said: list[str] = []
    plan = Plan.make(ServeConfig(model=str(make_model(tmp_path / "model")), device="cpu"), said.append, offline=True)
    assert (plan.composition.attention.name, plan.composition.ops.name) == ("torch", "torch")
    assert said[-1].startswith("without the CPU kernels, attention.torch and ops.torch serve: ")
    assert str(compiler) in said[-1]
    assert "\n" not in said[-1]
