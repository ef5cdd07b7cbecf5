"""How a model is split: the ranks' ranges tile it exactly, whatever its shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpserve.distributed.partition import Partition, Range, possible_sizes
from tpserve.errors import ModelError
from tpserve.models.config import ModelConfig, Rope


def shape(*, q_heads: int = 9, kv_heads: int = 3, intermediate: int = 1536, vocab_size: int = 49152) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden=576,
        layers=2,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=64,
        intermediate=intermediate,
        vocab_size=vocab_size,
        tie_embeddings=True,
        rope=Rope(theta=10000.0),
        rms_eps=1e-5,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=0,
        max_context=8192,
        eos_ids=(2,),
        dtype="float32",
    )


SMOLLM2 = shape()


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    kv_heads = draw(st.integers(1, 12))
    config = shape(
        q_heads=kv_heads * draw(st.integers(1, 12)),
        kv_heads=kv_heads,
        intermediate=draw(st.integers(1, 2000)),
        vocab_size=draw(st.integers(1, 5000)),
    )
    return config, draw(st.sampled_from(possible_sizes(config)))


def ranks(config: ModelConfig, size: int) -> list[Partition]:
    return [Partition.of(config, size, rank) for rank in range(size)]


def tiles(ranges: list[Range], total: int) -> bool:
    """Whether the ranges lie end to end and cover 0 … total - 1."""
    ends = [0, *(one.stop for one in ranges)]
    return [one.start for one in ranges] == ends[:-1] and ends[-1] == total


@given(splits())
def test_query_heads_mlp_and_vocabulary_are_tiled_in_rank_order(split: tuple[ModelConfig, int]) -> None:
    config, size = split
    parts = ranks(config, size)

    assert tiles([part.q_heads for part in parts], config.q_heads)
    assert tiles([part.mlp for part in parts], config.intermediate)
    assert tiles([part.vocab for part in parts], config.vocab_size)


@given(splits())
def test_every_rank_has_work_and_the_first_have_most(split: tuple[ModelConfig, int]) -> None:
    config, size = split
    parts = ranks(config, size)

    for sizes in ([part.q_heads.size for part in parts], [part.mlp.size for part in parts]):
        assert min(sizes) >= 1
        assert sizes == sorted(sizes, reverse=True)


@given(splits())
def test_a_rank_holds_the_kv_heads_that_its_query_heads_read(split: tuple[ModelConfig, int]) -> None:
    config, size = split
    group = config.q_heads // config.kv_heads

    for part in ranks(config, size):
        read = [head // group for head in range(part.q_heads.start, part.q_heads.stop)]
        assert sorted(set(read)) == list(range(part.kv_heads.start, part.kv_heads.stop))
        here = part.q_heads.size // part.kv_heads.size  # the group on this rank, as attention counts it
        assert [head - part.kv_heads.start for head in read] == [i // here for i in range(part.q_heads.size)]


@given(splits())
def test_the_vocabulary_is_padded_to_equal_aligned_shards(split: tuple[ModelConfig, int]) -> None:
    config, size = split
    parts = ranks(config, size)

    (rows,) = {part.vocab_rows for part in parts}
    assert rows % 64 == 0
    assert rows * size >= config.vocab_size
    for part in parts:
        assert part.vocab.size <= rows
        assert part.vocab.size == 0 or part.vocab.start == part.rank * rows


@given(splits())
def test_wide_mlps_are_cut_at_multiples_of_sixteen(split: tuple[ModelConfig, int]) -> None:
    config, size = split

    if config.intermediate >= 16 * size:
        assert all(part.mlp.start % 16 == 0 for part in ranks(config, size))


@given(st.integers(1, 8), st.integers(1, 8))
def test_any_size_up_to_the_kv_heads_and_their_even_multiples_are_possible(kv_heads: int, group: int) -> None:
    config = shape(q_heads=kv_heads * group, kv_heads=kv_heads)
    multiples = [kv_heads * copies for copies in range(2, group + 1) if group % copies == 0]

    assert possible_sizes(config) == [*range(1, kv_heads + 1), *multiples]


def test_smollm2_over_two_and_three_ranks() -> None:
    two, three = ranks(SMOLLM2, 2), ranks(SMOLLM2, 3)

    assert [(part.q_heads.size, part.kv_heads.size) for part in two] == [(6, 2), (3, 1)]
    assert [part.mlp.size for part in two] == [768, 768]
    assert [(part.q_heads, part.kv_heads) for part in three] == [
        (Range(0, 3), Range(0, 1)),
        (Range(3, 6), Range(1, 2)),
        (Range(6, 9), Range(2, 3)),
    ]
    assert [part.vocab_rows for part in three] == [16384] * 3


def test_more_ranks_than_kv_heads_share_them() -> None:
    parts = ranks(shape(q_heads=8, kv_heads=2), 4)

    assert [part.kv_heads for part in parts] == [Range(0, 1), Range(0, 1), Range(1, 2), Range(1, 2)]
    assert [part.q_heads for part in parts] == [Range(0, 2), Range(2, 4), Range(4, 6), Range(6, 8)]


def test_one_rank_has_everything() -> None:
    part = Partition.of(shape(vocab_size=100), 1, 0)

    assert (part.q_heads, part.kv_heads, part.mlp) == (Range(0, 9), Range(0, 3), Range(0, 1536))
    assert (part.vocab, part.vocab_rows) == (Range(0, 100), 128)


def test_a_small_vocabulary_may_leave_the_last_ranks_none() -> None:
    assert [part.vocab.size for part in ranks(shape(vocab_size=100), 3)] == [64, 36, 0]


@pytest.mark.parametrize("size", [0, 4, 6, 8, 18])
def test_an_impossible_size_is_refused_with_the_possible_ones(size: int) -> None:
    with pytest.raises(ModelError, match=f"cannot be split over {size} ranks") as caught:
        Partition.of(SMOLLM2, size, 0)

    assert caught.value.hint == "Sizes that can: 1, 2, 3, 9"


def test_no_rank_goes_without_mlp() -> None:
    assert possible_sizes(shape(intermediate=2)) == [1, 2]


def test_possible_sizes_end_where_asked() -> None:
    assert possible_sizes(SMOLLM2, up_to=2) == [1, 2]
