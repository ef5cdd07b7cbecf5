"""Weights drawn at random, for benchmarks: the shapes of a model without its files."""

from __future__ import annotations

import torch

from tpserve.distributed.partition import Partition
from tpserve.models.config import ModelConfig
from tpserve.weights.layout import targets

__all__ = ["draw_shard"]

DEVIATION = 0.02


def draw_shard(
    config: ModelConfig, partition: Partition, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """One rank's tensors as :func:`tpserve.weights.loader.load_shard` returns them, drawn on the device.

    All are normal with a standard deviation of 0.02, but norms, which are 1, and the vocabulary's padding, which is 0.
    The same arguments on the same kind of device give the same bits.
    """
    generator = torch.Generator(device).manual_seed(partition.rank)
    tensors = {}
    for target in targets(config, partition):
        if not target.wanted:
            continue
        tensor = torch.empty(target.shape, dtype=dtype, device=device)
        if target.name.endswith("norm.weight"):
            tensor.fill_(1)
        else:
            tensor.normal_(0, DEVIATION, generator=generator)
        tensor[len(tensor) - target.padding :].zero_()
        tensors[target.name] = tensor
    if config.tie_embeddings:
        tensors["head.weight"] = tensors["embed.weight"]
    return tensors
