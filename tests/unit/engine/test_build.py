from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch

from tpserve.api import AttentionShape
from tpserve.config import ServeConfig
from tpserve.engine import memory
from tpserve.engine.memory import allocate_caches, check_room, page_bytes, page_count
from tpserve.errors import LaunchError, ModelError
from tpserve.step import Sequence, Step, TokenWrite
from tpserve.testing.engine import generate

GIB = 1 << 30
SHAPE = AttentionShape(
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    page_size=4,
    max_context=1 << 20,
    max_running=1 << 10,
    scale=1.0,
    dtype="bfloat16",
    device="cpu",
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say how much memory the machine has."""

    def set_memory(total: int, available: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=available))

    return set_memory


def test_bytes_of_a_page() -> None:
    assert page_bytes(SHAPE) == 2 * 2 * 4 * 2 * 8 * 2


def test_kv_tokens_are_taken_as_they_are() -> None:
    assert page_count(ServeConfig(kv_tokens=1001), SHAPE, 1) == 251


def test_the_pool_leaves_the_rest_of_the_memory_alone(machine: Any) -> None:
    machine(total=10 * GIB, available=2 * GIB)
    config = ServeConfig(memory_fraction=0.9)
    assert page_count(config, SHAPE, 1) == pytest.approx(GIB / page_bytes(SHAPE), rel=1e-3)
    assert page_count(config, SHAPE, 4) == pytest.approx(GIB / 4 / page_bytes(SHAPE), rel=1e-3)


@pytest.mark.parametrize(("device_step", "share"), [(1, 1), (0, 4)])
def test_a_gpu_is_shared_and_keeps_a_reserve(device_step: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * GIB, 10 * GIB))
    config = ServeConfig(memory_fraction=0.5, device_step=device_step)
    shape = msgspec.structs.replace(SHAPE, device="cuda:0")
    expected = (4 * GIB / share - GIB // 2) / page_bytes(SHAPE)
    assert page_count(config, shape, 4, reserve=GIB // 2) == pytest.approx(expected, rel=1e-3)


def test_the_pool_is_modest_on_a_large_machine(machine: Any) -> None:
    machine(total=1000 * GIB, available=900 * GIB)
    assert page_count(ServeConfig(), SHAPE, 1) == memory.CPU_POOL // page_bytes(SHAPE)


def test_the_pool_is_never_larger_than_the_slots_could_fill(machine: Any) -> None:
    machine(total=100 * GIB, available=90 * GIB)
    shape = msgspec.structs.replace(SHAPE, max_context=30, max_running=3)
    assert page_count(ServeConfig(), shape, 1) == 3 * math.ceil(30 / 4)


def test_a_full_machine_is_refused(machine: Any) -> None:
    machine(total=10 * GIB, available=GIB)
    with pytest.raises(LaunchError, match="of the 90 % of the memory of cpu that may be in use, all is"):
        page_count(ServeConfig(memory_fraction=0.9), SHAPE, 1)


@pytest.mark.parametrize(
    ("changes", "weights", "says"),
    [
        ({}, 3 * GIB, "no room for the weights of a rank, 3.0 GiB, in the memory of cpu"),
        ({"max_running": 1 << 16}, 0, "no room for tables of 65,536 requests and 1,048,576 positions, 320.0 GiB"),
        ({"max_running": 1, "max_context": 10**9}, 0, "no room for tables of 1 requests and 1,000,000,000 positions"),
    ],
)
def test_what_does_not_fit_beside_the_pool_is_refused(
    machine: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], weights: int, says: str
) -> None:
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=GIB))
    machine(total=10 * GIB, available=GIB)
    shape = msgspec.structs.replace(SHAPE, **{"max_running": 100, **changes})
    with pytest.raises(LaunchError, match=says):
        check_room(shape, weights)
    machine(total=1000 * GIB, available=900 * GIB)
    check_room(shape, weights)


def test_what_an_earlier_engine_had_on_a_gpu_is_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
    shape = msgspec.structs.replace(SHAPE, device="cuda:0", max_running=1)
    for reserved, weights in ((GIB, GIB), (3 * GIB, 3 * GIB)):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, reserved=reserved: reserved)
        check_room(shape, weights)
        with pytest.raises(LaunchError, match=r"no room for the weights of a rank, .* in the memory of cuda:0"):
            check_room(shape, weights + 1)


def test_an_engine_without_room_is_refused_before_anything_is_loaded(
    small_model: Any, make_engine: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=0))
    machine(total=GIB, available=100_000)
    with pytest.raises(LaunchError, match="no room for the weights of a rank"):
        make_engine(small_model("llama"))


def test_the_pool_is_zero_and_split_into_contiguous_layers() -> None:
    caches = allocate_caches(SHAPE, 5)
    assert len(caches) == 2
    for cache in (each for layer in caches for each in layer):
        assert cache.shape == (5, 4, 2, 8)
        assert cache.dtype == torch.bfloat16
        assert cache.is_contiguous()
        assert not cache.any()
    caches[0][0].fill_(1)
    assert not caches[0][1].any()
    assert not caches[1][0].any()


def test_limits_are_those_of_model_and_settings(small_model: Any, make_engine: Any) -> None:
    folder = small_model("qwen3")
    limits = make_engine(folder, max_context=100, max_running_requests=3, page_size=8, kv_tokens=50).limits
    assert msgspec.structs.asdict(limits) == {
        "pages": 7,
        "page_size": 8,
        "slots": 3,
        "max_context": 100,
        "vocab_size": 320,
        "eos_ids": (2,),
    }
    assert make_engine(folder, max_context=0).limits.max_context == 2048
    assert make_engine(folder, max_context=4096).limits.max_context == 2048


def test_uneven_ranks_agree_on_the_least_pages(small_model: Any, on_ranks: Any, machine: Any, tmp_path: Path) -> None:
    machine(total=GIB, available=GIB)
    settings = {"kv_tokens": 0, "memory_fraction": 0.002, "max_running_requests": 1000}
    results = on_ranks(small_model("llama"), 2, tmp_path, lambda engine: engine.limits.pages, **settings)
    # Rank 0 has two of the three KV heads, so it has room for fewer pages.
    mine = 3 * 2 * 16 * 2 * 16 * 4
    assert [pages for pages, _ in results] == [int(0.002 * GIB / 2 // mine)] * 2


def test_the_last_position_of_the_context_can_be_drawn(small_model: Any, make_engine: Any) -> None:
    engine = make_engine(small_model("llama"), max_context=40)
    assert len(generate(engine, [list(range(3, 33))], 10)[0]) == 10


def test_a_step_without_a_draw_has_no_tokens(small_model: Any, make_engine: Any) -> None:
    engine = make_engine(small_model("llama"))
    assert engine.launch(Step([Sequence(0, 0, 2, sample=False)], [TokenWrite(0, 0, [5, 6])])).tokens() == []


def test_dummy_weights_are_not_read(small_model: Any, make_engine: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((small_model("qwen3") / "config.json").read_bytes())
    prompts = [[5, 6, 7], [8]]
    first, second = (generate(make_engine(tmp_path, load_format="dummy"), prompts, 8) for _ in range(2))
    assert first == second
    assert len(set(first[0])) > 2


def test_threads_are_set(small_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    make_engine(small_model("llama"), threads=3)
    assert seen == [3]


def test_weights_of_another_shape_are_refused(small_model: Any, make_engine: Any, tmp_path: Path) -> None:
    folder = small_model("llama")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({**config, "intermediate_size": 160}))
    with pytest.raises(ModelError, match="has shape"):
        make_engine(tmp_path)


def test_close_twice(small_model: Any, make_engine: Any) -> None:
    engine = make_engine(small_model("llama"))
    engine.close()
    engine.close()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_stays_close_to_float32(name: str, small_model: Any, on_ranks: Any, tmp_path: Path) -> None:
    prompts = [list(range(3, 40)), [9, 8, 7]]

    def first_logits(dtype: str) -> torch.Tensor:
        run_dir = tmp_path / dtype
        run_dir.mkdir()
        results = on_ranks(small_model(name), 2, run_dir, lambda engine: generate(engine, prompts, 1), dtype=dtype)
        return results[0][1][0]

    exact, coarse = first_logits("float32"), first_logits("bfloat16")
    assert coarse.dtype == torch.bfloat16
    assert torch.cosine_similarity(exact, coarse.float(), dim=1).min() > 0.99


@pytest.mark.parametrize("pages", [1 << 40, 1 << 60])
def test_a_pool_that_does_not_fit_is_told(pages: int) -> None:
    with pytest.raises(
        LaunchError, match=r"no room for a KV pool of [0-9,]+ tokens, [0-9,.]+ GiB, in the memory of cpu"
    ):
        allocate_caches(SHAPE, pages)
