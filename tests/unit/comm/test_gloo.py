"""Ranks are threads here: a group keeps no state outside itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from tpserve.api import Closed, CommContext, DeadlineExceeded, NoOptions, PeerLost
from tpserve.comm.gloo import GlooComm


def on_ranks(run_dir: Path, size: int, work: Callable[[GlooComm], Any], timeout: float = 30.0) -> list[Any]:
    """What ``work`` returns on each rank."""

    def rank(number: int) -> Any:
        comm = GlooComm(NoOptions(), CommContext(number, size, run_dir, "comm", "cpu", timeout))
        try:
            return work(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def noise_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_sums_and_ends_with_the_same_bits(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    found = on_ranks(tmp_path, size, lambda comm: comm.all_reduce(noise_of(comm.context.rank, 5, 577, dtype=dtype)))
    expected = sum(noise_of(rank, 5, 577, dtype=dtype).double() for rank in range(size))
    torch.testing.assert_close(found[0].double(), expected, rtol=3e-2, atol=6e-2 if dtype != torch.float32 else 1e-5)
    assert all(torch.equal(found[0], other) for other in found)


def test_all_gather_puts_ranks_side_by_side(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, 3, lambda comm: comm.all_gather(noise_of(comm.context.rank, 2, 4)))
    expected = torch.cat([noise_of(rank, 2, 4) for rank in range(3)], dim=1)
    assert all(torch.equal(expected, each) for each in found)


def test_all_gather_takes_views(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, 2, lambda comm: comm.all_gather(noise_of(comm.context.rank, 3, 8)[:, 2:5]))
    assert torch.equal(found[0], torch.cat([noise_of(rank, 3, 8)[:, 2:5] for rank in range(2)], dim=1))


def test_broadcast_replaces_in_place(tmp_path: Path) -> None:
    def work(comm: GlooComm) -> torch.Tensor:
        mine = noise_of(comm.context.rank, 4)
        assert comm.broadcast(mine, source=1) is mine
        return mine

    assert all(torch.equal(noise_of(1, 4), each) for each in on_ranks(tmp_path, 3, work))


def test_min_is_exact_in_64_bits(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, lambda comm: comm.min((1 << 62) + 1 - comm.context.rank)) == [1 << 62] * 2


def test_a_peer_that_has_gone_is_an_error_that_names_the_rank(tmp_path: Path) -> None:
    def work(comm: GlooComm) -> str:
        if comm.context.rank == 1:
            return ""
        try:
            while True:
                comm.all_reduce(torch.ones(8))
        except PeerLost as error:
            return str(error)

    assert on_ranks(tmp_path, 2, work)[0].startswith("rank 0 of 2, all_reduce: ")


def test_a_silent_peer_is_an_error_at_the_timeout(tmp_path: Path) -> None:
    given_up = Event()

    def work(comm: GlooComm) -> bool:
        if comm.context.rank == 1:
            return given_up.wait(60)
        with pytest.raises(DeadlineExceeded, match=r"rank 0 of 2, min: no answer within 1\.0 s"):
            comm.min(1)
        given_up.set()
        return True

    assert on_ranks(tmp_path, 2, work, timeout=1.0) == [True, True]


def test_use_after_close(tmp_path: Path) -> None:
    def work(comm: GlooComm) -> None:
        comm.close()
        comm.close()
        with pytest.raises(Closed):
            comm.min(1)

    on_ranks(tmp_path, 2, work)
