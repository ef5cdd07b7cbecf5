from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tpserve.api import Comm, CommContext, CommSpec, PeerLost
from tpserve.comm.options import ShmCommOptions
from tpserve.comm.shm import PART, SHAPES, ShmComm
from tpserve.plugins.builtin import tpserve_comms
from tpserve.testing.comm import CommContract, Ranks


class TestShm(CommContract):
    @pytest.fixture
    def spec(self) -> CommSpec:
        return next(spec for spec in tpserve_comms() if spec.name == "shm")

    def test_what_is_larger_than_a_part_goes_in_several(self, ranks: Ranks) -> None:
        """Rows that fill parts unevenly, and a row that fills more than one."""
        for shape in ((700, 1000), (3, PART // 4 + 5)):
            mine = [self.draw(rank, *shape) for rank in range(2)]
            found = ranks(2, lambda comm, mine=mine: comm.all_gather(mine[comm.context.rank]))
            assert all(torch.equal(torch.cat(mine, dim=1), each) for each in found)
            found = ranks(2, lambda comm, mine=mine: comm.all_reduce(mine[comm.context.rank].clone()))
            assert all(torch.equal(mine[0] + mine[1], each) for each in found)

    def test_shapes_and_dtypes_take_turns(self, ranks: Ranks) -> None:
        """More of them than are remembered, each more than once, and at either place for a part."""
        shapes = [(1 + n % 3, 1 + n) for n in range(SHAPES)]

        def work(comm: Comm) -> bool:
            for shape in (*shapes, *shapes[::-1], (0, 5)):
                for dtype in (torch.float32, torch.bfloat16):
                    summed = comm.all_reduce(torch.full(shape, 1 + comm.context.rank, dtype=dtype))
                    assert torch.equal(summed, torch.full(shape, 3, dtype=dtype))
            return True

        assert ranks(2, work) == [True, True]

    def test_views_are_summed_and_filled(self, ranks: Ranks) -> None:
        """Tensors whose elements do not lie one after the other."""

        def work(comm) -> list[list[float]]:
            table = torch.arange(12.0).view(3, 4) * (1 + comm.context.rank)
            summed = comm.all_reduce(table[:, 1:3])
            comm.broadcast(table[:, 0], 1)
            return [summed.flatten().tolist(), table[:, 0].tolist()]

        expected = [[3.0, 6.0, 15.0, 18.0, 27.0, 30.0], [0.0, 8.0, 16.0]]
        assert ranks(2, work) == [expected, expected]

    @pytest.mark.parametrize(("cores", "looks"), [({0}, False), ({0, 1}, True), ({0, 1, 2}, True)])
    def test_ranks_look_for_each_other_where_each_has_a_core(
        self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, cores: set[int], looks: bool
    ) -> None:
        """Of those that they may use, however many the machine has."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        looked = []
        monkeypatch.setattr(os, "sched_yield", lambda: looked.append(True))

        def work(comm: Comm) -> None:
            comm.min(1)
            if comm.context.rank:
                time.sleep(0.1)
            comm.min(1)

        ranks(2, work)
        assert bool(looked) is looks


def test_all_ranks_name_the_one_that_went_first(tmp_path: Path) -> None:
    """One follower does not see another go, but the leader, who went for that reason."""

    def rank(number: int) -> str:
        comm = ShmComm(ShmCommOptions(), CommContext(number, 3, tmp_path, "comm", "cpu", timeout=30.0))
        with closing(comm):
            if number == 2:
                return ""
            with pytest.raises(PeerLost) as lost:
                comm.min(1)
            return str(lost.value)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, range(3))) == [
            "rank 0 of 3, min: rank 2 has gone",
            "rank 1 of 3, min: rank 2 has gone",
            "",
        ]


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        comm = ShmComm(ShmCommOptions(), CommContext(number, 2, tmp_path, "comm", "cpu", timeout=30.0))
        comm.min(1)
        comm.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))
    assert list(tmp_path.iterdir()) == []
