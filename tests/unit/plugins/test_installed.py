"""All plugins of the workspace keep what is asked of any package."""

from __future__ import annotations

import pytest

from tpserve.plugins.registry import Plugin, Registry
from tpserve.testing.package import PackageContract

REGISTRY = Registry.discover()
USABLE = [
    entry
    for entry, status in zip(REGISTRY.entries(), REGISTRY.statuses(REGISTRY.entries()), strict=True)
    if status.state == "available"
]


class TestInstalled(PackageContract):
    @pytest.fixture(params=USABLE, ids=lambda entry: entry.key)
    def found(self, request: pytest.FixtureRequest) -> Plugin:
        return REGISTRY.describe(request.param)


def test_there_are_such() -> None:
    assert {"transport.zmq", "transport.nng", "policy.lpm", "policy.priority"} <= {entry.key for entry in USABLE}
