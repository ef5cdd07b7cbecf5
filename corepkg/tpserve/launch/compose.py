"""What a server is made of: each part chosen, checked against what it must do, and the reason why.

Everything is decided before a process starts or a weight is read, so what cannot work is refused in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from tpserve.api import Spec
from tpserve.config import AUTO, ServeConfig
from tpserve.distributed.partition import Partition
from tpserve.errors import ConfigError, PluginError, UnavailablePlugin, UnsupportedByPlugin
from tpserve.launch.affinity import Place, place_ranks
from tpserve.launch.checks import (
    anything,
    can_be_recorded,
    check_attention,
    check_comm,
    check_fanout,
    check_ops,
    check_pipes,
)
from tpserve.launch.devices import Accelerators, Device, choose_device
from tpserve.models.config import ModelConfig
from tpserve.plugins.registry import Registry
from tpserve.settings import kind_flag, plugin_options

__all__ = ["Composition", "Part", "load_part", "resolve"]

TRANSPORTS = ("zmq", "nng")
SYNCS = ("shm", "inband", "gloo")
POLICIES = ("fcfs",)
KERNELS = {"cuda": ("triton", "flashinfer", "torch"), "cpu": ("cpu", "torch")}
COMMS = {"cuda": ("peer", "nccl", "gloo"), "cpu": ("shm", "gloo")}
"""What auto takes, best first."""

CUDA_STEP_TOKENS = 16384
CPU_STEP_TOKENS = (128, 1024)
"""The most tokens of a step unless ``max_step_tokens`` says otherwise; on the CPU the least and the most of that."""

CPU_STEP_WORK = 6e10
"""Multiply-adds of a step on the CPU: about a second on two cores. A server that stops waits for its last steps."""

DEFAULTS = {"policy": ServeConfig().policy}
"""Kinds whose default is a name and not auto."""

Check = Callable[[Spec], str | None]
"""Says what a part lacks, or None."""


class Part(msgspec.Struct, frozen=True):
    """A chosen plugin.

    Attributes:
        kind: its kind.
        name: its name.
        reason: why it was chosen, in one line.
        provider: the distribution that it comes from, with version.
        options: what was set about it; checked.
    """

    kind: str
    name: str
    reason: str
    provider: str
    options: dict[str, Any] = {}


class Composition(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one server or offline engine; None where none is needed.

    Attributes:
        transport: carries the fan-out; None with one rank.
        pipes: carries the pipes; None for an offline engine, whose messages stay in one process.
        sync: announces rounds; None with one rank.
        policy: decides what runs next.
        attention: attention kernels.
        decode_attention: those for sequences with one new token, if they are others.
        ops: the fused steps and the sampler.
        comm: combines tensors; None with one rank.
        device: what is computed on.
        dtype: name of the dtype of weights and cache.
        dtype_reason: why that.
        partitions: each rank's share of the model.
        places: where each rank runs.
        step_tokens: the most tokens that one step computes.
        step_reason: why so many.
        overlap: whether a round is decided while the step before is computed.
        cuda_graph: whether decode steps are replayed from CUDA graphs.
        cuda_graph_reason: why, or why not.
    """

    transport: Part | None
    pipes: Part | None
    sync: Part | None
    policy: Part
    attention: Part
    decode_attention: Part | None = None
    ops: Part
    comm: Part | None
    device: Device
    dtype: str
    dtype_reason: str
    partitions: list[Partition]
    places: list[Place]
    step_tokens: int
    step_reason: str
    overlap: bool
    cuda_graph: bool
    cuda_graph_reason: str


def resolve(
    config: ServeConfig, model: ModelConfig, registry: Registry, accelerators: Accelerators, *, offline: bool = False
) -> Composition:
    """Choose every part.

    Args:
        config: what was asked for.
        model: the model's shape.
        registry: the plugins there are.
        accelerators: what there is to compute on.
        offline: messages stay in one process, so pipes are not needed.

    Raises:
        UnsupportedByPlugin: a part that was asked for cannot do what it must.
        UnavailablePlugin, UnknownPlugin, PluginConflict, PluginError: a part that was asked for cannot be used, or none
            that auto knows can.
        ConfigError: options that a part does not have, or an affinity or attention that is not understood.
        ModelError: the model cannot be split over so many ranks.
        LaunchError: there are too few devices.
    """
    partitions = [Partition.of(model, config.tp, rank) for rank in range(config.tp)]
    device = choose_device(config.device, config.base_device + (config.tp - 1) * config.device_step + 1, accelerators)
    dtype, dtype_reason = _dtype(config, model, device)
    step_tokens, step_reason = _step_tokens(config, model, device)
    several = config.tp > 1
    kernels = KERNELS[device.type]
    fits_attention = partial(check_attention, config, model, device, dtype)
    chooser = _Chooser(registry, config)
    fits_transport = partial(check_fanout, several or not offline)
    transport = chooser.choose_if(several, "transport", config.transport, TRANSPORTS, fits_transport)
    attention, decode_attention = _attention(chooser, config, kernels, fits_attention)
    ops = chooser.choose("ops", config.ops, kernels, partial(check_ops, device, dtype))
    comm = chooser.choose_if(several, "comm", config.comm, COMMS[device.type], partial(check_comm, config, device))
    cuda_graph, cuda_graph_reason = _cuda_graph(config, device, registry, [decode_attention or attention, ops, comm])
    return Composition(
        transport=transport,
        pipes=None if offline else _pipes(chooser, config, transport),
        sync=chooser.choose_if(several, "sync", config.sync, SYNCS, anything),
        policy=chooser.choose("policy", config.policy, POLICIES, anything),
        attention=attention,
        decode_attention=decode_attention,
        ops=ops,
        comm=comm,
        device=device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        partitions=partitions,
        places=place_ranks(config, device.type),
        step_tokens=step_tokens,
        step_reason=step_reason,
        # On the CPU a step is over when it has been launched: its tokens would only come a step late.
        overlap=device.type != "cpu" if config.overlap is None else config.overlap,
        cuda_graph=cuda_graph,
        cuda_graph_reason=cuda_graph_reason,
    )


def load_part(part: Part) -> Callable[..., Any]:
    """Import a part's class and bind its options; call the result with what its constructor takes besides.

    Raises:
        UnavailablePlugin: its module cannot be imported.
    """
    plugin = Registry.discover().load(part.kind, part.name, probe=False)
    factory: Callable[..., Any] = plugin.factory()
    return partial(factory, plugin.make_options(part.options))


class _Chooser:
    """Chooses among the plugins there are."""

    def __init__(self, registry: Registry, config: ServeConfig) -> None:
        self._registry = registry
        self._config = config

    def choose(self, kind: str, wanted: str, candidates: Sequence[str], check: Check, *, general: bool = True) -> Part:
        """Take the part that is wanted, or for ``auto`` the first candidate that is available and passes the check.

        Args:
            kind: its kind.
            wanted: its name, or ``auto``.
            candidates: what ``auto`` may take, best first.
            check: what it must be able to do.
            general: options set for the kind as a whole are meant for it.
        """
        if wanted != AUTO:
            return self._take(kind, wanted, check, general)
        passed: list[str] = []
        for name in candidates:
            try:
                part = self._take(kind, name, check, general)
            except PluginError as error:
                passed.append(error.message)
            else:
                return msgspec.structs.replace(part, reason=_auto_reason(candidates, passed))
        raise UnavailablePlugin(
            f"no {kind} can be used: {'; '.join(passed)}", f"Make one of these usable: {', '.join(candidates)}"
        )

    def choose_if(self, needed: bool, kind: str, wanted: str, candidates: Sequence[str], check: Check) -> Part | None:
        """As :meth:`choose`; None where none is needed, but then too one that is asked for must be able to do it."""
        part = self.choose(kind, wanted, candidates, check) if needed or wanted != AUTO else None
        return part if needed else None

    def _take(self, kind: str, name: str, check: Check, general: bool) -> Part:
        plugin = self._registry.load(kind, name)
        problem = check(plugin.spec)
        if problem:
            raise UnsupportedByPlugin(f"{kind}.{name} {problem}", f"{kind_flag(kind)} auto takes one that can")
        options = plugin_options(self._config.options, kind, name, general=general)
        plugin.make_options(options)
        reason = "the default" if name == DEFAULTS.get(kind) else "asked for"
        return Part(kind, name, reason, f"{plugin.entry.distribution} {plugin.entry.version}", options)


def _pipes(chooser: _Chooser, config: ServeConfig, transport: Part | None) -> Part:
    """Pipes of the transport if it has some, else of another."""
    if config.pipe_transport not in (AUTO, config.transport):
        return chooser.choose("transport", config.pipe_transport, (), check_pipes, general=False)
    wanted = transport.name if transport else config.transport
    try:
        part = chooser.choose("transport", wanted, TRANSPORTS, check_pipes)
    except UnsupportedByPlugin as error:
        if config.pipe_transport != AUTO:
            raise
        part = chooser.choose("transport", AUTO, TRANSPORTS, check_pipes, general=False)
        return msgspec.structs.replace(part, reason=f"{part.reason}; {error.message}")
    return msgspec.structs.replace(part, reason="as the transport") if transport else part


def _attention(
    chooser: _Chooser, config: ServeConfig, candidates: Sequence[str], check: Check
) -> tuple[Part, Part | None]:
    """One backend for all sequences, or one for those with several new tokens and one for those with one."""
    names = config.attn.split(",")
    if len(names) == 1:
        return chooser.choose("attention", config.attn, candidates, check), None
    if len(names) > 2 or not all(names):
        raise ConfigError(f"attn is {config.attn!r}", "Write one backend, or two as PREFILL,DECODE")
    try:
        prefill = chooser.choose("attention", names[0], candidates, check)
        return prefill, chooser.choose("attention", names[1], candidates, check, general=False)
    except PluginError as error:
        raise type(error)(f"attn is {config.attn!r}: {error.message}", error.hint) from error


def _auto_reason(candidates: Sequence[str], passed: Sequence[str]) -> str:
    if passed:
        return f"auto: {'; '.join(passed)}"
    return "auto: the first of " + ", ".join(candidates) if len(candidates) > 1 else "auto: the only choice here"


def _dtype(config: ServeConfig, model: ModelConfig, device: Device) -> tuple[str, str]:
    if config.dtype != AUTO:
        return config.dtype, "asked for"
    if device.type == "cuda":
        return "bfloat16", "auto: on CUDA"
    if model.dtype == "float16":
        return "float32", "auto: float16 is slow and coarse on the CPU"
    return model.dtype, "auto: as the model is stored"


def _step_tokens(config: ServeConfig, model: ModelConfig, device: Device) -> tuple[int, str]:
    if config.max_step_tokens:
        return config.max_step_tokens, "asked for"
    if device.type == "cuda":
        return CUDA_STEP_TOKENS, "auto: on CUDA"
    least, most = CPU_STEP_TOKENS
    heads = 2 * (model.q_heads + model.kv_heads) * model.head_dim
    weights = model.layers * model.hidden * (heads + 3 * model.intermediate)
    power_of_two = 1 << int(CPU_STEP_WORK / weights).bit_length() >> 1
    return min(max(power_of_two, least), most), "auto: about a second on the CPU"


def _cuda_graph(
    config: ServeConfig, device: Device, registry: Registry, parts: Sequence[Part | None]
) -> tuple[bool, str]:
    if device.type != "cuda":
        return False, "not on CUDA"
    if not config.cuda_graph:
        return False, "asked for"
    specs = [registry.load(part.kind, part.name, probe=False).spec for part in parts if part]
    without = [f"{spec.kind}.{spec.name}" for spec in specs if not can_be_recorded(spec)]
    if without:
        return False, f"a graph cannot hold {', '.join(without)}"
    return True, "all kernels can be recorded"
