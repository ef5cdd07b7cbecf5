"""All that is decided about a server or an offline engine before a process starts, and how its processes start then."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tpserve.config import AUTO, ServeConfig
from tpserve.launch.compose import Composition, resolve
from tpserve.launch.devices import Accelerators, find_accelerators
from tpserve.launch.layout import Layout
from tpserve.launch.logging import rank_place
from tpserve.launch.post import Post, write_post
from tpserve.launch.process import Start
from tpserve.launch.protocol import ChildSpec
from tpserve.models.config import ModelConfig
from tpserve.native.build import prepare
from tpserve.outputs import check_outputs
from tpserve.plugins.registry import Registry
from tpserve.weights.cache import model_files
from tpserve.weights.source import ModelFolder, resolve_model

__all__ = ["Plan", "rank_start", "worker_start"]


class Plan(msgspec.Struct, frozen=True):
    """What was decided.

    Attributes:
        config: the settings.
        folder: the model on this machine.
        model: its shape.
        composition: the parts.
    """

    config: ServeConfig
    folder: ModelFolder
    model: ModelConfig
    composition: Composition

    @staticmethod
    def make(config: ServeConfig, notify: Callable[[str], None], *, offline: bool = False) -> Plan:
        """Find the model and choose the parts.

        Args:
            config: the settings.
            notify: told in one line what takes long, and what serves in the place of kernels that cannot be compiled.
            offline: messages stay in one process.

        Raises:
            UserError: the settings, the model, the plugins or the disk do not allow it.
        """
        check_outputs(config)
        registry = Registry.discover()
        folder = resolve_model(config.model, config.load_format, notify=notify)
        with model_files(folder.path):
            model = ModelConfig.from_folder(folder.path)
        accelerators = find_accelerators()
        flaw = prepare(notify) if _may_take_kernels(config, accelerators) else None
        composition = resolve(config, model, registry, accelerators, offline=offline)
        if flaw:
            attention, ops = composition.attention.name, composition.ops.name
            notify(f"without the CPU kernels, attention.{attention} and ops.{ops} serve: {flaw}")
        return Plan(config, folder, model, composition)

    def post(self, layout: Layout, index: int = 0) -> Post:
        """What one process needs to know."""
        return Post(config=self.config, composition=self.composition, model=self.folder, layout=layout, index=index)


def _may_take_kernels(config: ServeConfig, accelerators: Accelerators) -> bool:
    """Whether the compiled kernels of the CPU may be chosen."""
    on_cpu = config.device == "cpu" or accelerators.count == 0
    return on_cpu and not {config.attn, config.ops}.isdisjoint({AUTO, "cpu"})


def rank_start(post: Post) -> Start:
    """How a rank starts: threads are counted before torch is loaded."""
    place = post.composition.places[post.index]
    spec = ChildSpec(
        name=f"rank{post.index}",
        place=rank_place(post.index),
        main="tpserve.launch.roles:rank",
        payload=write_post(post),
        cpus=place.cpus,
        log_level=post.config.log_level,
    )
    return Start(spec, {"OMP_NUM_THREADS": str(place.threads), **QUIET}, is_forked=True)


def worker_start(role: str, name: str, payload: msgspec.Struct, log_level: str, *descriptors: int) -> Start:
    """How a process without torch starts.

    Args:
        role: its function in :mod:`tpserve.launch.roles`.
        name: its name, and its place in the log.
        payload: what the function takes.
        log_level: debug, info, warning or error.
        descriptors: what it inherits.
    """
    spec = ChildSpec(
        name=name,
        place=name,
        main=f"tpserve.launch.roles:{role}",
        payload=write_post(payload),
        log_level=log_level,
    )
    return Start(spec, {"OMP_NUM_THREADS": "1", **QUIET}, descriptors)


QUIET = {"TOKENIZERS_PARALLELISM": "false"}
"""A tokenizer process turns one request after the other into tokens: threads of its library would only wait."""
