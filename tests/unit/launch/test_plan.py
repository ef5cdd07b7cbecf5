from __future__ import annotations

from typing import Any

import pytest
from tests.unit.launch.sample import NONE, TWO

from tpserve.config import ServeConfig
from tpserve.launch.devices import Accelerators
from tpserve.launch.plan import _may_take_kernels


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
