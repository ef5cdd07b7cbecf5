"""What a plugin says of itself: one frozen spec for each part that it offers.

A spec is data. It names the class that does the work as a string, so that a package can be listed,
checked and chosen without importing a heavy library.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

__all__ = [
    "API_VERSION",
    "KINDS",
    "AttentionCapabilities",
    "AttentionSpec",
    "CommCapabilities",
    "CommSpec",
    "NoOptions",
    "Options",
    "OpsCapabilities",
    "OpsSpec",
    "PolicyCapabilities",
    "PolicySpec",
    "Spec",
    "SyncCapabilities",
    "SyncSpec",
    "TransportCapabilities",
    "TransportSpec",
]

API_VERSION = 1
"""The plugin API's version; a plugin module states the one it was written for as ``TPSERVE_API``."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a plugin's options: subclass it with typed fields that all have defaults.

    People set them with ``-o kind.field=value``, in a file or in the environment; a wrong name or type
    is refused with the plugin's name and the field.
    """


class NoOptions(Options, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For a plugin that has nothing to set."""


class TransportCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a transport offers.

    Attributes:
        fanout: it carries the leader's frames to followers.
        pipes: it also carries many-to-one pipes.
        multi_process: its ends may live in different processes.
        schemes: the kinds of address that it takes: ``ipc``, ``tcp``, and ``tcp6`` for those of IPv6.
        multi_node: its ends may live on different machines.
    """

    fanout: bool = True
    pipes: bool = False
    multi_process: bool = True
    schemes: tuple[str, ...] = ("ipc",)
    multi_node: bool = False


class SyncCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a count synchronisation offers.

    Attributes:
        multi_node: ranks may be on different machines.
    """

    multi_node: bool = False


class PolicyCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy offers; nothing to choose from yet."""


class AttentionCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an attention backend can compute. An empty tuple means any.

    Attributes:
        devices: device types: ``cpu``, ``cuda``.
        dtypes: dtype names.
        head_dims: sizes of a head.
        page_sizes: tokens a page.
        min_sm: the least CUDA compute capability times ten (90 for Hopper), or 0.
        cuda_graph: a CUDA graph can hold its decode.
        sliding_window: it can limit how far back a token sees.
        soft_cap: it can bound the scores.
    """

    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    page_sizes: tuple[int, ...] = ()
    min_sm: int = 0
    cuda_graph: bool = False
    sliding_window: bool = False
    soft_cap: bool = False


class OpsCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a set of ops can compute. An empty tuple means any.

    Attributes:
        devices: device types.
        dtypes: dtype names.
        min_sm: the least CUDA compute capability times ten, or 0.
        cuda_graph: a CUDA graph can hold them.
    """

    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    min_sm: int = 0
    cuda_graph: bool = False


class CommCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a tensor communication offers.

    Attributes:
        devices: device types whose tensors it combines.
        shared_device: two ranks may use one device.
        multi_node: ranks may be on different machines.
        cuda_graph: a CUDA graph can hold its operations.
    """

    devices: tuple[str, ...] = ()
    shared_device: bool = True
    multi_node: bool = False
    cuda_graph: bool = False


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What every kind's spec has.

    Attributes:
        name: what people write on the command line; lower case, digits, ``_``.
        summary: one line for ``tpserve plugins list``.
        factory: ``package.module:Class`` of the implementation.
        options: the class of its options.
        requires: requirement strings checked against installed metadata, nothing imported (``pyzmq>=26``).
        probe: ``package.module:function``, or empty. The function takes nothing and returns None if the part is
            usable on this machine, or the reason why not; it runs in a child process with a time limit.
    """

    kind: ClassVar[str]

    name: str
    summary: str
    factory: str
    options: type[Options] = NoOptions
    requires: tuple[str, ...] = ()
    probe: str = ""


class TransportSpec(Spec, frozen=True, kw_only=True):
    """A :class:`~tpserve.api.transport.Transport`."""

    kind = "transport"
    capabilities: TransportCapabilities = TransportCapabilities()


class SyncSpec(Spec, frozen=True, kw_only=True):
    """A :class:`~tpserve.api.sync.Sync`."""

    kind = "sync"
    capabilities: SyncCapabilities = SyncCapabilities()


class PolicySpec(Spec, frozen=True, kw_only=True):
    """A :class:`~tpserve.api.policy.Policy`."""

    kind = "policy"
    capabilities: PolicyCapabilities = PolicyCapabilities()


class AttentionSpec(Spec, frozen=True, kw_only=True):
    """An :class:`~tpserve.api.attention.Attention`."""

    kind = "attention"
    capabilities: AttentionCapabilities = AttentionCapabilities()


class OpsSpec(Spec, frozen=True, kw_only=True):
    """An :class:`~tpserve.api.ops.Ops`."""

    kind = "ops"
    capabilities: OpsCapabilities = OpsCapabilities()


class CommSpec(Spec, frozen=True, kw_only=True):
    """A :class:`~tpserve.api.comm.Comm`."""

    kind = "comm"
    capabilities: CommCapabilities = CommCapabilities()


KINDS: dict[str, type[Spec]] = {
    spec.kind: spec for spec in (TransportSpec, SyncSpec, PolicySpec, AttentionSpec, OpsSpec, CommSpec)
}
"""The kinds of part that exist, in the order in which they are listed."""
