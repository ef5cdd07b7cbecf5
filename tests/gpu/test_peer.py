"""The peer comm between CUDA devices: the contract, CUDA graphs of sums of many sizes, and a rank that is killed."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tpserve.api import Comm, CommContext, CommSpec, PeerLost
from tpserve.comm.options import PeerCommOptions
from tpserve.plugins.builtin import tpserve_comms
from tpserve.testing.comm import CommContract, Ranks

DEVICES = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
USABLE = len(DEVICES) > 1 and importlib.util.find_spec("triton") is not None

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason="needs two CUDA devices and triton")]

KIB = 1024
SIZES = [16, 2 * KIB, 2 * KIB + 16, 40, 8 * KIB, 100 * KIB + 48, 1024 * KIB, 16, 4096 * KIB, 5000 * KIB, 64 * KIB]
PATIENCE = 120.0


class TestPeer(CommContract):
    devices = DEVICES

    @pytest.fixture
    def spec(self) -> CommSpec:
        return next(spec for spec in tpserve_comms() if spec.name == "peer")

    @pytest.fixture
    def tpserve_guard(self) -> None:
        """CUDA and NCCL keep threads and descriptors of their own."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_sums_of_many_sizes(self, ranks: Ranks, dtype: torch.dtype) -> None:
        """In one order, launched and from a graph, with numbers whose bits are all set."""

        def parts(rank: int, turn: int) -> list[torch.Tensor]:
            drawn = [self.draw(100 * turn + rank, size // dtype.itemsize, dtype=dtype) for size in SIZES]
            for part in drawn:
                part.view(torch.uint8)[-4:] = 255 if turn % 2 else 0
            return drawn

        def work(comm: Comm) -> list[list[torch.Tensor]]:
            device = torch.device(comm.context.device)
            given = [part.to(device) for part in parts(comm.context.rank, 0)]
            found = [[comm.all_reduce(each.clone()).cpu() for each in given]]
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                sums = [comm.all_reduce(each.clone()) for each in given]
                graph.capture_end()
                for turn in range(1, 5):
                    for each, part in zip(given, parts(comm.context.rank, turn), strict=True):
                        each.copy_(part)
                    graph.replay()
                    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    done.record(stream)
                    comm.wait(done)
                    found.append([each.cpu() for each in sums])
            del graph
            return found

        for found in ranks(2, work):
            for turn, sums in enumerate(found):
                for first, second, result in zip(parts(0, turn), parts(1, turn), sums, strict=True):
                    expected = (first.float() + second.float()).to(dtype)
                    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def member(folder: Path, rank: int, tell: Connection) -> None:
    """A rank that adds up until the other has gone, and tells how far it is and how it ends."""
    from tpserve.comm.peer import PeerComm

    comm = PeerComm(PeerCommOptions(), CommContext(rank, 2, folder, "comm", DEVICES[rank], 30.0, PATIENCE))
    torch.cuda.set_device(DEVICES[rank])
    x = torch.zeros(4096, device=DEVICES[rank])
    graph = torch.cuda.CUDAGraph()
    comm.all_reduce(x)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(10):
            comm.all_reduce(x)
    try:
        for number in range(1_000_000):
            graph.replay()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            comm.wait(done)
            if number == 100:
                tell.send("under way")
        tell.send("nothing happened")
    except PeerLost as error:
        tell.send(str(error))
    del graph
    comm.close()
    tell.send(float(torch.ones(3, device=DEVICES[rank]).sum()))


def test_a_rank_that_is_killed_ends_the_others_wait(tmp_path: Path) -> None:
    """Which processes on their own show, and the driver's handles of memory."""
    start = multiprocessing.get_context("spawn")
    pipes: list[Any] = [start.Pipe(duplex=False) for _ in range(2)]
    ranks = [start.Process(target=member, args=(tmp_path, rank, pipes[rank][1])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for hears, _ in pipes:
            assert hears.poll(PATIENCE)
            assert hears.recv() == "under way"
        assert ranks[1].pid is not None
        os.kill(ranks[1].pid, signal.SIGKILL)
        for expected in ("rank 0 of 2, wait: rank 1 has gone", 3.0):
            assert pipes[0][0].poll(PATIENCE)
            assert pipes[0][0].recv() == expected
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
