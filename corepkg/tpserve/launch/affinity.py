"""Where each rank runs: its device, its cores and how many threads it computes with."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from tpserve.config import AUTO, ServeConfig
from tpserve.distributed.quota import quota
from tpserve.errors import ConfigError

__all__ = ["Place", "parse_cpus", "place_ranks"]

TOPOLOGY = Path("/sys/devices/system")

logger = logging.getLogger(__name__)


class Place(msgspec.Struct, frozen=True):
    """Where one rank runs.

    Attributes:
        device: a torch device: ``cpu``, ``cuda:2``.
        threads: compute threads on the CPU; equal on all ranks, as their results must be.
        cpus: the cores that it is held to; empty: all.
    """

    device: str
    threads: int
    cpus: list[int]


class Core(msgspec.Struct, frozen=True, order=True):
    """A logical CPU; cores sort by NUMA node, then by physical core."""

    node: int
    physical: tuple[int, int]
    cpu: int


def place_ranks(config: ServeConfig, device: str, cores: list[Core] | None = None) -> list[Place]:
    """Place all ranks of a server on this machine.

    Neighbouring ranks get neighbouring cores, so the ranks of one NUMA node stay there.

    Args:
        config: tp, threads, cpu_affinity, base_device and device_step count.
        device: ``cpu`` or ``cuda``.
        cores: what this process may run on; looked up unless given.

    Raises:
        ConfigError: ``cpu_affinity`` is not understood, or names cores that this process may not use.
    """
    limit = quota() if cores is None else math.inf
    cores = sorted(cores or usable_cores())
    shares = _shares(config, cores)
    physical = min(_physical(share) if share else _physical(cores) // config.tp for share in shares)
    threads = config.threads or max(1, int(min(physical, limit // config.tp)))
    room = max(1, min(len(share) or len(cores) // config.tp for share in shares))
    if device == "cpu" and threads > room:
        logger.warning("threads is %d and a rank's share of the cores %d: they get in each other's way", threads, room)
    return [
        Place(
            device if device == "cpu" else f"{device}:{config.base_device + rank * config.device_step}",
            threads,
            sorted(core.cpu for core in share),
        )
        for rank, share in enumerate(shares)
    ]


def usable_cores() -> list[Core]:
    """The logical CPUs that this process may run on."""
    nodes = {cpu: node for node, cpus in _numa_nodes() for cpu in cpus}
    return [Core(nodes.get(cpu, 0), _physical_id(cpu), cpu) for cpu in os.sched_getaffinity(0)]


def parse_cpus(text: str) -> Iterator[int]:
    """Read a list of cores as Linux writes it: ``0-3,8``. It may go far beyond the cores that there are.

    Raises:
        ValueError: it is no such list.
    """
    stretches = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        stretch = range(int(first), int(last or first) + 1)
        if not stretch:
            raise ValueError(f"{part!r} is empty")
        stretches.append(stretch)
    return chain.from_iterable(stretches)


def _shares(config: ServeConfig, cores: list[Core]) -> list[list[Core]]:
    """The cores of each rank; empty lists leave ranks where the system puts them."""
    if config.cpu_affinity not in (AUTO, "none"):
        return _listed(config, cores)
    if config.cpu_affinity == "none" or config.tp == 1 or config.tp > len({core.physical for core in cores}):
        return [[] for _ in range(config.tp)]
    physical = sorted({(core.node, core.physical) for core in cores})
    bounds = [rank * len(physical) // config.tp for rank in range(config.tp + 1)]
    return [
        [core for core in cores if (core.node, core.physical) in physical[bounds[rank] : bounds[rank + 1]]]
        for rank in range(config.tp)
    ]


def _listed(config: ServeConfig, cores: list[Core]) -> list[list[Core]]:
    lists = config.cpu_affinity.split(";")
    form = "Write auto, none, or one list a rank: 0-3;4-7"
    by_number = {core.cpu: core for core in cores}
    try:
        numbers = [parse_cpus(text) for text in lists]
    except ValueError:
        raise ConfigError(f"cpu_affinity is {config.cpu_affinity!r}, which lists no cores", form) from None
    if len(lists) != config.tp:
        raise ConfigError(f"cpu_affinity has {len(lists)} lists of cores for {config.tp} ranks", form)
    try:
        return [[by_number[cpu] for cpu in share] for share in numbers]
    except KeyError as error:
        raise ConfigError(f"cpu_affinity: this process may not run on core {error}", form) from None


def _physical(cores: list[Core]) -> int:
    return len({core.physical for core in cores})


def _numa_nodes() -> list[tuple[int, Iterator[int]]]:
    return [
        (int(path.parent.name.removeprefix("node")), parse_cpus(text))
        for path in sorted(TOPOLOGY.glob("node/node*/cpulist"))
        if (text := path.read_text().strip())
    ]


def _physical_id(cpu: int) -> tuple[int, int]:
    """Package and core; a CPU of its own where the system does not say."""
    topology = TOPOLOGY / f"cpu/cpu{cpu}/topology"
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return -1, cpu
