"""What a recording says of the rank that made it, and which policy decides when it is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tpserve.errors import ConfigError
from tpserve.launch.compose import Part
from tpserve.launch.post import Post
from tpserve.models.config import ModelConfig
from tpserve.plugins.registry import Registry
from tpserve.scheduler.recording import Header
from tpserve.scheduler.scheduler import Budget
from tpserve.settings import load_settings, plugin_options
from tpserve.step import EngineLimits
from tpserve.version import __version__

__all__ = ["header_of", "policy_part", "record_path"]


def record_path(post: Post) -> Path | None:
    """Where rank 0 records; each generation of processes into a file of its own."""
    record, generation = post.config.record, post.layout.generation
    if not record or post.index:
        return None
    return Path(record if generation == 1 else f"{record}.{generation}")


def header_of(post: Post, limits: EngineLimits, budget: Budget) -> Header:
    """The header of a rank's recording."""
    policy = post.composition.policy
    return Header(
        version=__version__,
        model=post.model.name,
        shape=msgspec.to_builtins(ModelConfig.from_folder(post.model.path)),
        limits=limits,
        budget=budget,
        policy=policy.name,
        options=policy.options,
        provider=policy.provider,
        tokenizers=post.config.tokenizers,
    )


def policy_part(header: Header, name: str | None, options: Sequence[str]) -> Part:
    """The policy that decides when a recording is replayed.

    Args:
        header: of the recording.
        name: of another policy than the recorded one, or None.
        options: what ``-o`` was given, for that other one.

    Raises:
        ConfigError: an option is wrong, or none can be given.
        PluginError: there is no such policy, or it has no such option.
    """
    if name is None:
        if options:
            raise ConfigError("-o goes with --policy", "The recorded policy decides with its recorded options")
        return Part("policy", header.policy, "recorded", header.provider, header.options)
    config = load_settings({"policy": name}, [*options], None, {})
    plugin = Registry.discover().load("policy", name)
    part_options = plugin_options(config.options, "policy", name)
    plugin.make_options(part_options)
    return Part("policy", name, "asked for", f"{plugin.entry.distribution} {plugin.entry.version}", part_options)
