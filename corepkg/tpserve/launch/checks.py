"""Whether a part can do what a server needs of it, read from the capabilities that its spec states.

Each check returns what is wrong, to be put behind the part's name (``transport.inproc`` *has no pipes*), or None.
"""

from __future__ import annotations

from typing import cast

from tpserve.api import (
    AttentionCapabilities,
    AttentionSpec,
    CommSpec,
    OpsCapabilities,
    OpsSpec,
    Spec,
    TransportCapabilities,
    TransportSpec,
)
from tpserve.config import ServeConfig
from tpserve.launch.devices import Device
from tpserve.models.config import ModelConfig

__all__ = ["anything", "can_be_recorded", "check_attention", "check_comm", "check_fanout", "check_ops", "check_pipes"]


def anything(spec: Spec) -> str | None:
    """For kinds whose parts all do the same."""
    return None


def check_fanout(between_processes: bool, spec: Spec) -> str | None:
    """A transport that carries frames to followers, in other processes if need be."""
    can = _transport(spec)
    if not can.fanout:
        return "has no fan-out"
    return "works inside one process only" if between_processes and not can.multi_process else None


def check_pipes(spec: Spec) -> str | None:
    """A transport with pipes between processes."""
    can = _transport(spec)
    if not can.pipes:
        return "has no pipes"
    return None if can.multi_process else "works inside one process only"


def check_attention(config: ServeConfig, model: ModelConfig, device: Device, dtype: str, spec: Spec) -> str | None:
    """Attention for this model's shape, on this device."""
    can = cast(AttentionSpec, spec).capabilities
    return _check_kernels(can, device, dtype) or _check_shape(can, config, model)


def check_ops(device: Device, dtype: str, spec: Spec) -> str | None:
    """Ops for this device and dtype."""
    can = cast(OpsSpec, spec).capabilities
    return _check_kernels(can, device, dtype)


def check_comm(config: ServeConfig, device: Device, spec: Spec) -> str | None:
    """Tensor communication between the ranks of this server."""
    can = cast(CommSpec, spec).capabilities
    if can.devices and device.type not in can.devices:
        return f"combines tensors of {_list(can.devices)}, not {device.type}"
    if device.type != "cpu" and config.device_step == 0 and not can.shared_device:
        return "needs a device for each rank, and device_step is 0"
    return None


def can_be_recorded(spec: Spec) -> bool:
    """Whether a CUDA graph can hold a part that computes."""
    return cast(AttentionSpec | OpsSpec | CommSpec, spec).capabilities.cuda_graph


def _check_kernels(can: AttentionCapabilities | OpsCapabilities, device: Device, dtype: str) -> str | None:
    if can.devices and device.type not in can.devices:
        return f"runs on {_list(can.devices)}, not {device.type}"
    if can.dtypes and dtype not in can.dtypes:
        return f"computes in {_list(can.dtypes)}, not {dtype}"
    if device.sm < can.min_sm:
        return f"needs compute capability {can.min_sm / 10:g}, and the device has {device.sm / 10:g}"
    return None


def _check_shape(can: AttentionCapabilities, config: ServeConfig, model: ModelConfig) -> str | None:
    if can.head_dims and model.head_dim not in can.head_dims:
        return f"has head sizes {_list(can.head_dims)}, and the model's is {model.head_dim}"
    if can.page_sizes and config.page_size not in can.page_sizes:
        return f"has page sizes {_list(can.page_sizes)}, not {config.page_size}"
    if model.sliding_window and not can.sliding_window:
        return "has no sliding window, and the model needs one"
    return None


def _transport(spec: Spec) -> TransportCapabilities:
    return cast(TransportSpec, spec).capabilities


def _list(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))
