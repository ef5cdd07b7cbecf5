from __future__ import annotations

from tpserve.bench.blocks import random_order


def test_every_block_has_every_arm_once_and_the_seed_decides() -> None:
    order = random_order(3, 30, seed=1)

    assert all(sorted(arms) == [0, 1, 2] for arms in order)
    assert len({tuple(arms) for arms in order}) == 6
    assert order == random_order(3, 30, seed=1) != random_order(3, 30, seed=2)


def test_no_arm_comes_first_more_often() -> None:
    order = random_order(2, 10, seed=0)

    assert [arms[0] for arms in order].count(0) == 5
    assert len(random_order(2, 7, seed=0)) == 7
