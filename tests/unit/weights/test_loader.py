"""Loading shards: side by side, those of all ranks are the model."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tpserve.distributed.partition import Partition, possible_sizes
from tpserve.errors import ModelError
from tpserve.models.config import ModelConfig
from tpserve.testing.models import make_model
from tpserve.weights import loader
from tpserve.weights.files import weight_files
from tpserve.weights.loader import load_shard, shard_bytes

Tensors = dict[str, torch.Tensor]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "llama-biased": ("llama", {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True, "vocab_size": 333}),
    "mistral": ("mistral", {"num_hidden_layers": 1, "intermediate_size": 90}),
    "qwen2": ("qwen2", {"num_hidden_layers": 1}),
    "qwen3": ("qwen3", {"num_hidden_layers": 1}),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, changes = MODELS[request.param]
    return make_model(tmp_path_factory.mktemp(request.param), architecture, **changes)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_model(tmp_path / "small", "qwen3", num_hidden_layers=1)


def load(folder: Path, size: int = 1, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, list[Tensors]]:
    config = ModelConfig.from_folder(folder)
    return config, [load_shard(folder, config, Partition.of(config, size, rank), dtype) for rank in range(size)]


def stacked(shards: list[Tensors], name: str, *, dim: int = 0) -> torch.Tensor:
    return torch.cat([shard[name] for shard in shards], dim=dim)


def qkv(config: ModelConfig, shards: list[Tensors], name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three projections put together again from the ranks' fused ones, each KV head once."""
    parts: list[list[torch.Tensor]] = [[], [], []]
    for rank, shard in enumerate(shards):
        part = Partition.of(config, len(shards), rank)
        sizes = [part.q_heads.size, part.kv_heads.size, part.kv_heads.size]
        q, k, v = shard[name].split([size * config.head_dim for size in sizes])
        repeated = rank > 0 and part.kv_heads == Partition.of(config, len(shards), rank - 1).kv_heads
        parts[0].append(q)
        if repeated:
            assert torch.equal(parts[1][-1], k)
            assert torch.equal(parts[2][-1], v)
        else:
            parts[1].append(k)
            parts[2].append(v)
    q, k, v = (torch.cat(part) for part in parts)
    return q, k, v


def test_the_shards_of_every_size_are_the_model(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    sizes = possible_sizes(ModelConfig.from_folder(folder))

    assert len(sizes) >= 3
    for size in sizes:
        config, shards = load(folder, size)
        assert torch.equal(stacked(shards, "embed.weight")[: config.vocab_size], stored["model.embed_tokens.weight"])
        assert not stacked(shards, "embed.weight")[config.vocab_size :].any()
        head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        assert torch.equal(stacked(shards, "head.weight")[: config.vocab_size], stored[head])
        assert all(torch.equal(shard["norm.weight"], stored["model.norm.weight"]) for shard in shards)
        for layer in range(config.layers):
            check_layer(config, shards, stored, f"layers.{layer}")


def check_layer(config: ModelConfig, shards: list[Tensors], stored: Tensors, here: str) -> None:
    there = f"model.{here}"
    for ours, theirs in [("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")]:
        assert all(torch.equal(shard[f"{here}.{ours}.weight"], stored[f"{there}.{theirs}.weight"]) for shard in shards)
    for kind in ["weight", "bias"] if config.qkv_bias else ["weight"]:
        for letter, whole in zip("qkv", qkv(config, shards, f"{here}.attn.qkv.{kind}"), strict=True):
            assert torch.equal(whole, stored[f"{there}.self_attn.{letter}_proj.{kind}"])
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        norms = [shard[f"{here}.attn.{name}.weight"] for shard in shards]
        assert all(torch.equal(norm, stored[f"{there}.self_attn.{name}.weight"]) for norm in norms)
    assert torch.equal(stacked(shards, f"{here}.attn.o.weight", dim=1), stored[f"{there}.self_attn.o_proj.weight"])

    for kind in ["weight", "bias"] if config.mlp_bias else ["weight"]:
        pairs = [shard[f"{here}.mlp.gate_up.{kind}"].chunk(2) for shard in shards]
        assert torch.equal(torch.cat([gate for gate, _ in pairs]), stored[f"{there}.mlp.gate_proj.{kind}"])
        assert torch.equal(torch.cat([up for _, up in pairs]), stored[f"{there}.mlp.up_proj.{kind}"])
    assert torch.equal(stacked(shards, f"{here}.mlp.down.weight", dim=1), stored[f"{there}.mlp.down_proj.weight"])

    for wanted, ours, theirs in [
        (config.o_bias, "attn.o", "self_attn.o_proj"),
        (config.mlp_bias, "mlp.down", "mlp.down_proj"),
    ]:
        assert [f"{here}.{ours}.bias" in shard for shard in shards] == [wanted, *[False] * (len(shards) - 1)]
        if wanted:
            assert torch.equal(shards[0][f"{here}.{ours}.bias"], stored[f"{there}.{theirs}.bias"])


def test_nothing_else_is_returned(small: Path) -> None:
    _, (tensors,) = load(small)
    parts = ["attn_norm", "attn.qkv", "attn.q_norm", "attn.k_norm", "attn.o", "mlp_norm", "mlp.gate_up", "mlp.down"]

    assert sorted(tensors) == sorted(
        ["embed.weight", "norm.weight", "head.weight", *(f"layers.0.{part}.weight" for part in parts)]
    )


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    _, shards = load(make_model(tmp_path, "llama", num_hidden_layers=1), 3)

    assert all(shard["head.weight"] is shard["embed.weight"] for shard in shards)


def test_tensors_have_the_dtype_asked_for_and_are_contiguous(small: Path) -> None:
    _, exact = load(small, 2)
    _, rounded = load(small, 2, torch.bfloat16)

    for rank in range(2):
        for name, tensor in rounded[rank].items():
            assert tensor.is_contiguous()
            assert torch.equal(tensor, exact[rank][name].bfloat16())


def test_a_rank_without_valid_rows_has_a_head_of_zeros(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen3", num_hidden_layers=1, vocab_size=100)
    _, shards = load(folder, 4)

    assert [shard["head.weight"].any().item() for shard in shards] == [True, True, False, False]
    assert all(shard["head.weight"].shape == (64, 64) for shard in shards)


def test_progress_rises_to_the_bytes_of_the_shard(small: Path) -> None:
    config = ModelConfig.from_folder(small)
    told: list[tuple[int, int]] = []

    tensors = load_shard(
        small, config, Partition.of(config, 2, 1), torch.bfloat16, progress=lambda *now: told.append(now)
    )

    total = sum(tensor.numel() * 2 for tensor in tensors.values())
    assert told == [(done, total) for done, _ in sorted(told)]
    assert told[-1] == (total, total)
    assert shard_bytes(config, Partition.of(config, 2, 1), torch.bfloat16) == total


def test_a_model_in_several_files(small: Path, tmp_path: Path) -> None:
    _, (whole,) = load(small)
    split(small)

    _, (again,) = load(small)

    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def split(folder: Path) -> None:
    """Store a folder's model in two files and an index, as large ones are."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change(folder: Path, tensors: Tensors) -> None:
    """Add or replace stored tensors; one without elements is taken out."""
    stored = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in stored.items() if tensor.numel()}, folder / "model.safetensors")


GONE = torch.empty(0)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"lm_head.weight": GONE}, "lacks lm_head.weight"),
        ({"model.layers.7.mlp.up_proj.weight": torch.ones(2)}, "has model.layers.7.mlp.up_proj.weight"),
        ({"model.norm.weight": torch.ones(65)}, r"model.norm.weight has shape \[65\], .* makes it \[64\]"),
        ({"model.norm.weight": torch.ones(64, 1)}, r"shape \[64, 1\]"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "model.norm.weight is not stored as float64"),
        ({f"extra.{i}": torch.ones(1) for i in range(6)}, "extra.0, extra.1, extra.2, extra.3 and 2 more tensors"),
    ],
)
def test_wrong_tensors_are_named(small: Path, tensors: Tensors, words: str) -> None:
    change(small, tensors)

    with pytest.raises(ModelError, match=words):
        load(small)


def test_what_old_files_store_twice_is_passed_over(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama", num_hidden_layers=1)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(
        folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": embedding.double()}
    )

    _, shards = load(folder, 3)

    assert all(shard["head.weight"] is shard["embed.weight"] for shard in shards)


def test_a_tied_head_that_differs_is_refused_by_the_rank_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "ROWS", 35)  # the last row of the last rank's 106 is by itself
    folder = make_model(tmp_path, "llama", num_hidden_layers=1)
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    config = ModelConfig.from_folder(folder)
    for wrong, refusing in ((head, {2}), (head[:200].clone(), {0, 1, 2})):
        change(folder, {"lm_head.weight": wrong})
        for rank in range(3):
            says = (
                r"lm_head\.weight differs from model\.embed_tokens\.weight, and config.json says .* Write false there"
            )
            with pytest.raises(ModelError, match=says) if rank in refusing else nullcontext():
                load_shard(folder, config, Partition.of(config, 3, rank), torch.float32)


def test_a_tied_head_is_a_float_and_may_hold_what_is_none(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama", num_hidden_layers=1)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    embedding[3, 5] = math.nan
    config = ModelConfig.from_folder(folder)
    change(folder, {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()})
    load_shard(folder, config, Partition.of(config, 1, 0), torch.float32)
    change(folder, {"lm_head.weight": embedding.to(torch.int8)})
    with pytest.raises(ModelError, match=r"lm_head\.weight is not stored as float64, float32, bfloat16 or float16"):
        load_shard(folder, config, Partition.of(config, 1, 0), torch.float32)


def test_a_file_that_is_cut_short(small: Path) -> None:
    file = small / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])

    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors") as caught:
        load(small)
    assert "damaged" in caught.value.hint


@pytest.mark.parametrize("name", ["../stray.safetensors", "/stray.safetensors", "a/b", "", 3, None, ["a"]])
def test_an_index_points_at_files_of_its_folder(small: Path, name: object) -> None:
    (small.parent / "stray.safetensors").write_bytes((small / "model.safetensors").read_bytes())
    (small / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelError, match="which is not the name of a file in the same folder"):
        weight_files(small)


def test_a_file_of_the_index_that_is_missing(small: Path) -> None:
    split(small)
    (small / "b.safetensors").unlink()

    with pytest.raises(ModelError, match=r"has no b\.safetensors") as caught:
        load(small)
    assert caught.value.hint == "model.safetensors.index.json lists it: the download is incomplete"


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": null}'])
def test_an_index_that_lists_nothing(small: Path, content: str) -> None:
    (small / "model.safetensors.index.json").write_text(content)

    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json lists no files"):
        weight_files(small)


def test_a_folder_without_weights(small: Path) -> None:
    (small / "model.safetensors").unlink()

    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load(small)
