"""The contract of the ``comm`` kind as tests: subclass :class:`CommContract` and give it your spec.

class TestMine(CommContract):
    @pytest.fixture
    def spec(self):
        return plugin.tpserve_comms()[0]

Ranks are threads here: an implementation keeps no state outside itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest
import torch

from tpserve.api import Closed, Comm, CommContext, CommSpec, DeadlineExceeded, Options, PeerLost
from tpserve.testing.lab import Task, see_soon_after
from tpserve.testing.processes import PATIENCE, load

__all__ = ["CommContract"]

Ranks = Callable[..., list[Any]]
"""Calls a function with each rank's comm: ``(size, work, timeout=30.0)``; what it returns, by rank."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class CommContract:
    """Subclass it, with the fixture ``spec``.

    Attributes:
        devices: where the tensors of each rank are; groups of more ranks than there are devices are not tried.
    """

    pytestmark = pytest.mark.usefixtures("tpserve_guard")

    devices: ClassVar[list[str]] = ["cpu"] * 4

    @pytest.fixture
    def spec(self) -> CommSpec:
        """The spec of the comm under test."""
        raise NotImplementedError("give your comm's spec in a fixture of this name")

    @pytest.fixture
    def options(self, spec: CommSpec) -> Options:
        """The options to test with; override it to try others."""
        return spec.options()

    @pytest.fixture
    def ranks(self, spec: CommSpec, options: Options, tmp_path: Path) -> Ranks:
        """A new group at each call."""
        groups = iter(range(1000))

        def on_ranks(size: int, work: Callable[[Comm], Any], timeout: float = 30.0) -> list[Any]:
            if size > len(self.devices):
                pytest.skip(f"needs {size} devices")
            name = f"comm{next(groups)}"

            def rank(number: int) -> Any:
                device = self.devices[number]
                context = CommContext(number, size, tmp_path, name, device, timeout, join_timeout=PATIENCE)
                comm: Comm = load(spec.factory)(options, context)
                try:
                    return work(comm)
                finally:
                    comm.close()

            with ThreadPoolExecutor(size) as pool:
                return list(pool.map(rank, range(size)))

        return on_ranks

    def draw(self, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random numbers on the CPU, others for each rank."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)

    def mine(self, comm: Comm, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What is drawn for this rank, on its device."""
        return self.draw(comm.context.rank, *shape, dtype=dtype).to(comm.context.device)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_all_reduce_sums_and_ends_with_the_same_bits(self, ranks: Ranks, size: int, dtype: torch.dtype) -> None:
        """Which is more than the same sum: order matters."""
        found = ranks(size, lambda comm: comm.all_reduce(self.mine(comm, 5, 577, dtype=dtype)).cpu())
        expected = sum(self.draw(rank, 5, 577, dtype=dtype).double() for rank in range(size))
        torch.testing.assert_close(found[0].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert found[0].dtype == dtype
        assert all(torch.equal(found[0], other) for other in found)

    def test_a_sum_does_not_depend_on_timing(self, ranks: Ranks) -> None:
        """Again and again the same bits."""
        size = min(3, len(self.devices))
        first, *others = [
            ranks(size, lambda comm: [comm.all_reduce(self.mine(comm, 3000)).cpu() for _ in range(5)]) for _ in range(3)
        ]
        for rank, results in [(rank, results) for group in (first, *others) for rank, results in enumerate(group)]:
            assert all(torch.equal(first[0][0], result) for result in results), f"rank {rank}"

    def test_large_tensors(self, ranks: Ranks) -> None:
        """Several megabytes, more than any buffer holds."""

        def work(comm: Comm) -> torch.Tensor:
            return comm.all_reduce(torch.full((4 << 20,), 1.0 + comm.context.rank).to(comm.context.device)).cpu()

        assert all(bool((each == 3.0).all()) for each in ranks(2, work))

    @pytest.mark.parametrize("size", [2, 3])
    def test_all_gather_puts_ranks_side_by_side(self, ranks: Ranks, size: int) -> None:
        """In rank order, along the last dimension; of views too."""
        found = ranks(size, lambda comm: comm.all_gather(self.mine(comm, 3, 8)[:, 2:5]).cpu())
        expected = torch.cat([self.draw(rank, 3, 8)[:, 2:5] for rank in range(size)], dim=1)
        assert all(torch.equal(expected, each) for each in found)

    @pytest.mark.parametrize(("rows", "columns"), [(0, 5), (3, 0)])
    def test_empty_tensors(self, ranks: Ranks, rows: int, columns: int) -> None:
        """Of no rows, or of rows of nothing; and the ranks are at one after that."""

        def work(comm: Comm) -> None:
            mine = self.mine(comm, rows, columns, dtype=torch.bfloat16)
            found = [comm.all_reduce(mine.clone()), comm.broadcast(mine), comm.all_gather(mine)]
            assert [each.shape for each in found] == [(rows, columns), (rows, columns), (rows, 2 * columns)]
            assert all(each.dtype == mine.dtype and each.device == mine.device for each in found)
            assert comm.min(comm.context.rank) == 0
            assert float(comm.all_reduce(torch.ones(1).to(comm.context.device))) == 2.0

        ranks(2, work)

    @pytest.mark.parametrize("source", [0, 1, 2])
    def test_broadcast_replaces_in_place(self, ranks: Ranks, source: int) -> None:
        """From any rank, of any dtype."""

        def work(comm: Comm) -> torch.Tensor:
            mine = torch.arange(4, dtype=torch.int64).to(comm.context.device) + 10 * comm.context.rank
            assert comm.broadcast(mine, source) is mine
            return mine.cpu()

        size = max(2, source + 1)
        assert [each.tolist() for each in ranks(size, work)] == [[10 * source + n for n in range(4)]] * size

    def test_min_is_exact_in_64_bits(self, ranks: Ranks) -> None:
        """Which a floating-point number is not."""
        for high in (1 << 62, -(1 << 62)):
            assert ranks(2, lambda comm, high=high: comm.min(high + 3 - comm.context.rank)) == [high + 2] * 2

    def test_operations_follow_each_other(self, ranks: Ranks) -> None:
        """As layers do."""

        def work(comm: Comm) -> list[float]:
            results = []
            for step in range(50):
                x = torch.full((2, 3), float(step + comm.context.rank)).to(comm.context.device)
                results += [float(comm.all_reduce(x.clone()).sum()), float(comm.all_gather(x).sum()), comm.min(step)]
            return results

        first, second = ranks(2, work)
        assert first == second
        assert first[:3] == [6.0, 6.0, 0]

    def test_a_peer_that_has_gone_is_an_error(self, ranks: Ranks) -> None:
        """PeerLost, not a hang."""
        joined = Event()

        def work(comm: Comm) -> None:
            if comm.context.rank == 1:
                assert joined.wait(PATIENCE)
                return
            joined.set()
            while True:
                comm.all_reduce(torch.ones(8).to(comm.context.device))

        with pytest.raises(PeerLost):
            ranks(2, work)

    def test_a_silent_peer_is_an_error_at_the_timeout(self, ranks: Ranks) -> None:
        """DeadlineExceeded."""
        given_up = Event()

        def work(comm: Comm) -> None:
            if comm.context.rank == 1:
                assert given_up.wait(PATIENCE)
                return
            with pytest.raises(DeadlineExceeded):
                comm.min(1)
            given_up.set()

        ranks(2, work, timeout=1.0)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_missing_rank_is_an_error_on_joining(
        self, spec: CommSpec, options: Options, tmp_path: Path, rank: int
    ) -> None:
        """When ``join_timeout`` has passed, which is another than ``timeout``."""
        context = CommContext(rank, 2, tmp_path, "comm", self.devices[0], timeout=2 * PATIENCE, join_timeout=0.5)
        make = load(spec.factory)
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            Task(make, options, context).result()
        see_soon_after(begun + 0.5)

    def test_groups_close_twice_and_are_then_closed(self, ranks: Ranks) -> None:
        """And a call after that says so."""

        def work(comm: Comm) -> None:
            comm.min(1)
            comm.close()
            comm.close()
            with pytest.raises(Closed):
                comm.min(1)

        ranks(2, work)
