"""The kernels compute what the contract says, on the CPU in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from tpserve.api import AttentionShape, NoOptions
from tpserve.testing.attention import AttentionCase, AttentionContract, attention_oracle
from tpserve.testing.package import PackageContract
from tpserve_attn_triton.plugin import tpserve_attentions

pytest.importorskip("triton")

from tpserve_attn_triton.attention import TritonAttention, _query_blocks
from tpserve_attn_triton.decode import FIELDS, cut
from tpserve_attn_triton.tiles import Tile, Tiles, choose_tiles

SPEC = tpserve_attentions()[0]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = AttentionShape(
    layers=1,
    q_heads=2,
    kv_heads=1,
    head_dim=16,
    page_size=4,
    max_context=2048,
    max_running=8,
    scale=0.25,
    dtype="float32",
    device=DEVICE,
)


class TestPackage(PackageContract):
    plugin = "attention.triton"


class TestTriton(AttentionContract):
    capabilities = SPEC.capabilities
    device = DEVICE

    def make(self, shape: AttentionShape) -> TritonAttention:
        return TritonAttention(NoOptions(), shape)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("lengths", [[300], [200, 3, 64], [1, 320, 65]], ids=str)
def test_caches_that_are_cut_are_put_together(lengths: list[int], window: int) -> None:
    shape = msgspec.structs.replace(SHAPE, sliding_window=window)
    attention = in_small_tiles(shape)
    check(attention, AttentionCase.random(shape, [(1, length) for length in lengths]))
    assert attention._used.item() > len(lengths)
    assert not attention._arrived.any()


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 20}, {"soft_cap": 1.0}, {"q_heads": 3}], ids=str)
def test_prompts_are_computed_in_blocks(changes: dict[str, Any]) -> None:
    shape = msgspec.structs.replace(SHAPE, **changes)
    check(in_small_tiles(shape), AttentionCase.random(shape, [(40, 90), (1, 50), (17, 17)]))


def test_a_query_may_be_a_part_of_a_larger_tensor() -> None:
    case = AttentionCase.random(SHAPE, [(3, 9), (1, 7)])
    query = torch.cat([case.query + 1, case.query, case.query - 1], dim=1)[:, 2:4]
    check(TritonAttention(NoOptions(), SHAPE), dataclasses.replace(case, query=query))


def test_a_row_without_a_cache_is_zero() -> None:
    case = AttentionCase.random(SHAPE, [(1, 5), (1, 1), (1, 30)])
    case.batch.kv_lens_tensor[1] = 0  # as in a graph that holds more rows than there are sequences
    attention = in_small_tiles(SHAPE)
    attention.plan(case.batch)
    found = attention.run(case.query, case.k_cache, case.v_cache).double().cpu()
    torch.testing.assert_close(found[[0, 2]], attention_oracle(case)[[0, 2]], rtol=1e-5, atol=1e-5)
    assert not found[1].any()


def in_small_tiles(shape: AttentionShape) -> TritonAttention:
    attention = TritonAttention(NoOptions(), shape)
    attention._tiles = Tiles(Tile(16, 16, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2))
    return attention


def check(attention: TritonAttention, case: AttentionCase) -> None:
    attention.plan(case.batch)
    found = attention.run(case.query, case.k_cache, case.v_cache)
    torch.testing.assert_close(found.double().cpu(), attention_oracle(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_parts_cover_what_is_seen_once(seed: int) -> None:
    random = Random(seed)
    count, spare = random.randint(1, 16), random.randint(1, 40)
    window = random.choice([0, 0, 100, 1000])
    lengths = [random.choice([1, 15, 16, 17, random.randint(1, 300), random.randint(1, 5000)]) for _ in range(count)]
    slots = random.sample(range(99), count)
    parts = torch.full((count + spare, FIELDS), -7, dtype=torch.int32, device=DEVICE)
    used = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    members = random.sample(range(count), count)
    cut[(1,)](
        torch.tensor(members, dtype=torch.int32, device=DEVICE),
        torch.tensor(slots, device=DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * 3,
        parts,
        used,
        count,
        spare,
        window,
        ROOM=16,
        BLOCK=16,
        FIELDS=FIELDS,
    )
    rows = parts[: used.item(), :6].tolist()
    blocks = [-(-(part[3] - part[2]) // 16) for part in rows if parts[part[4], 2] == part[2]]
    assert blocks == sorted(blocks, reverse=True)
    assert (parts[used.item() :] == -7).all()
    for member in members:
        first = next(i for i, part in enumerate(rows) if part[0] == 3 * member)
        pieces = rows[first][5]
        position = max(0, lengths[member] - window) if window else 0
        for row, slot, start, stop, begins, count_ in rows[first : first + pieces]:
            assert (row, slot, begins, count_) == (3 * member, slots[member], first, pieces)
            assert start == position < stop
            position = stop
        assert position == lengths[member]
        rows[first : first + pieces] = [[-1] * 6] * pieces
    assert all(row[0] == -1 for row in rows)


def test_query_blocks_cover_every_new_token_once_and_the_heaviest_come_first() -> None:
    case = AttentionCase.random(SHAPE, [(5, 5), (1, 40), (9, 30)])
    one, _, other = case.batch.slots
    blocks = [(14, 29, 1, other), (10, 25, 4, other), (6, 21, 4, other), (4, 4, 1, one), (0, 0, 4, one)]
    assert _query_blocks(case.batch, 4) == blocks


@pytest.mark.parametrize(("sm", "room"), [(80, 163 << 10), (86, 99 << 10), (90, 227 << 10), (120, 99 << 10)])
@pytest.mark.parametrize("columns", [16, 64, 128, 256])
@pytest.mark.parametrize("item", [2, 4])
def test_tiles_fit_the_shared_memory_of_a_multiprocessor(item: int, columns: int, sm: int, room: int) -> None:
    tiles = choose_tiles(item, columns, sm, group=8)
    for tile in (tiles.small, tiles.large, tiles.prefill):
        assert (tile.rows + 2 * tile.block * tile.stages) * columns * item < 0.9 * room
        assert tile.rows >= 16


def test_rows_hold_every_group() -> None:
    assert choose_tiles(2, 128, 90, group=71).large.rows == 128
    assert choose_tiles(2, 128, 90, group=3).large.rows == 16


@pytest.mark.parametrize(("count", "block"), [(1, 16), (2, 32), (12, 32), (13, 16), (16, 16), (17, 32), (29, 32)])
def test_programs_are_small_for_one_sequence_and_where_all_are_there_at_once(count: int, block: int) -> None:
    shape = msgspec.structs.replace(SHAPE, max_running=40)
    attention = in_small_tiles(shape)
    check(attention, AttentionCase.random(shape, [(1, 1 + 5 * i) for i in range(count)]))
    assert attention._decode_tile().block == block
