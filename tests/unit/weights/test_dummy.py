from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tpserve.distributed.partition import Partition
from tpserve.models.config import ModelConfig
from tpserve.testing.models import make_model
from tpserve.weights.dummy import draw_shard
from tpserve.weights.loader import load_shard


@pytest.mark.parametrize(("architecture", "size"), [("llama", 1), ("llama", 2), ("qwen2", 1), ("qwen3", 4)])
def test_a_shard_has_the_tensors_of_one_that_is_loaded(architecture: str, size: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path, architecture, num_hidden_layers=1)
    config = ModelConfig.from_folder(folder)
    for rank in range(size):
        partition = Partition.of(config, size, rank)
        loaded, drawn = (
            load_shard(folder, config, partition, torch.bfloat16),
            draw_shard(config, partition, torch.bfloat16),
        )
        assert {name: (each.shape, each.dtype) for name, each in drawn.items()} == {
            name: (each.shape, each.dtype) for name, each in loaded.items()
        }
        assert (drawn["head.weight"] is drawn["embed.weight"]) == config.tie_embeddings


def test_numbers_are_small_norms_are_one_and_padding_is_zero(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_model(tmp_path, "llama", vocab_size=333, num_hidden_layers=1))
    partition = Partition.of(config, 3, 2)
    shard, again = (draw_shard(config, partition, torch.float32) for _ in range(2))
    assert all(torch.equal(shard[name], again[name]) for name in shard)
    gate_up = shard["layers.0.mlp.gate_up.weight"]
    assert gate_up.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(gate_up.mean().item()) < 0.001
    assert (shard["norm.weight"] == 1).all()
    padding = partition.vocab_rows - partition.vocab.size
    assert not shard["embed.weight"][len(shard["embed.weight"]) - padding :].any()
    other = draw_shard(config, Partition.of(config, 3, 1), torch.float32)
    assert not torch.equal(other["layers.0.attn.o.weight"], shard["layers.0.attn.o.weight"])
