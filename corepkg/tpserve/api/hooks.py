"""The hooks through which every part reaches tpserve, built-in ones included.

A plugin package offers an entry point in group ``tpserve`` for each part, named ``kind.name``
(``transport.nng``), that points at a light module::

    # my_package/plugin.py
    from tpserve.api import TransportSpec, hookimpl

    TPSERVE_API = 1

    @hookimpl
    def tpserve_transports():
        return [TransportSpec(name="mine", summary="…", factory="my_package.transport:Mine")]

Kinds, names and conflicts are read from the entry points' names alone. Only the module of a part that is
used or described gets imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from tpserve.api.specs import AttentionSpec, CommSpec, OpsSpec, PolicySpec, SyncSpec, TransportSpec

__all__ = ["ENTRY_POINT_GROUP", "HOOKS", "HookSpecs", "hookimpl", "hookspec"]

ENTRY_POINT_GROUP = "tpserve"

HOOKS: dict[str, str] = {
    "transport": "tpserve_transports",
    "sync": "tpserve_syncs",
    "policy": "tpserve_policies",
    "attention": "tpserve_attentions",
    "ops": "tpserve_ops",
    "comm": "tpserve_comms",
}
"""The hook that offers the parts of each kind."""

hookspec = pluggy.HookspecMarker("tpserve")
hookimpl = pluggy.HookimplMarker("tpserve")


class HookSpecs:
    """One hook for each kind; a module implements those whose parts it offers."""

    @hookspec
    def tpserve_transports(self) -> Sequence[TransportSpec]:  # type: ignore[empty-body]
        """Message transports."""

    @hookspec
    def tpserve_syncs(self) -> Sequence[SyncSpec]:  # type: ignore[empty-body]
        """Count synchronisations."""

    @hookspec
    def tpserve_policies(self) -> Sequence[PolicySpec]:  # type: ignore[empty-body]
        """Scheduler policies."""

    @hookspec
    def tpserve_attentions(self) -> Sequence[AttentionSpec]:  # type: ignore[empty-body]
        """Attention backends."""

    @hookspec
    def tpserve_ops(self) -> Sequence[OpsSpec]:  # type: ignore[empty-body]
        """Fused layer steps and samplers."""

    @hookspec
    def tpserve_comms(self) -> Sequence[CommSpec]:  # type: ignore[empty-body]
        """Tensor communication."""
