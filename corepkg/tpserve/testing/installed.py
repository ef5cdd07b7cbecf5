"""The contract of a plugin that is installed, by its name.

    from tpserve.testing.installed import contract_of, package_of

    TestPackage = package_of("transport.mine")
    TestContract = contract_of("transport.mine")

``tpserve plugins check`` runs these two lines. A package's own tests rather subclass the contract, where they can give
other options and add tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from tpserve.api import AttentionSpec, CommSpec, OpsSpec, PolicySpec, SyncSpec, TransportSpec
from tpserve.plugins.registry import Registry
from tpserve.testing.package import PackageContract

__all__ = ["contract_of", "package_of"]


def package_of(key: str) -> type[PackageContract]:
    """The tests of an installed plugin's package, for ``kind.name``."""
    return type("Installed", (PackageContract,), {"plugin": key})


def contract_of(key: str, device: str = "cpu") -> type[Any]:
    """The contract of an installed plugin's kind, bound to it.

    Args:
        key: ``kind.name``.
        device: where tensors are, for the kinds that compute.

    Raises:
        UnknownPlugin, PluginConflict, PluginError, UnavailablePlugin: as for :meth:`Registry.load`.
    """
    kind, _, name = key.partition(".")
    plugin = Registry.discover().load(kind, name, probe=False)
    spec = plugin.spec

    def make(test: Any, *context: Any) -> Any:
        return plugin.factory()(spec.options(), *context)

    match spec:
        case TransportSpec():
            from tpserve.testing.transport import TransportContract

            return _bound(TransportContract, spec=_fixture(spec))
        case AttentionSpec():
            from tpserve.testing.attention import AttentionContract

            return _bound(AttentionContract, capabilities=spec.capabilities, device=device, make=make)
        case OpsSpec():
            from tpserve.testing.ops import OpsContract

            return _bound(OpsContract, capabilities=spec.capabilities, device=device, make=make)
        case SyncSpec():
            from tpserve.testing.sync import SyncContract, fanout_between_processes

            return _bound(SyncContract, spec=_fixture(spec), transport=_fixture(fanout_between_processes()))
        case PolicySpec():
            from tpserve.testing.policy import PolicyContract

            return _bound(PolicyContract, spec=_fixture(spec))
        case CommSpec():
            from tpserve.testing.comm import CommContract

            return _bound(CommContract, spec=_fixture(spec), device=device)
    raise AssertionError(f"there is no contract for {kind}")


def _bound(contract: type[Any], **attributes: Any) -> type[Any]:
    return type("Installed", (contract,), attributes)


def _fixture(value: Any) -> Any:
    return pytest.fixture(lambda test: value)
