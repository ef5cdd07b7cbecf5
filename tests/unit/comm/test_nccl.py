"""The NCCL comm beside a device that does what tests tell it; tests/gpu holds it to the contract on real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest
import torch

from tpserve.api import Closed, CommContext, DeadlineExceeded, NoOptions, PeerLost
from tpserve.comm import nccl, probe
from tpserve.distributed.nccl import NcclError

ID = bytes(range(128))


class Communicator:
    """Launches what never ends until it is aborted, or what ends at once."""

    made: ClassVar[list[Communicator]] = []

    def __init__(self, id: bytes, rank: int, size: int, device: torch.device) -> None:
        assert id == ID
        if size == 3:
            raise NcclError("NCCL says: Duplicate GPU detected")
        self.ended = Event()
        self.calls: list[str] = []
        self.made.append(self)

    def all_reduce(self, tensor: torch.Tensor, operator: int = 0) -> None:
        self.calls.append("all_reduce")
        if len(tensor) == 99:  # as where ranks have to connect first
            assert self.ended.wait(60)
            raise NcclError("NCCL says: internal error")

    def abort(self) -> None:
        self.calls.append("abort")
        self.ended.set()

    def destroy(self) -> None:
        self.calls.append("destroy")


class Done:
    """A CUDA event that the device has come to."""

    def record(self, stream: object) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Stuck:
    """A CUDA event behind an operation that never ends."""

    def __init__(self, communicator: Communicator) -> None:
        self._ended = communicator.ended

    def synchronize(self) -> None:
        assert self._ended.wait(60)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nccl, "Communicator", Communicator)
    monkeypatch.setattr(nccl, "make_id", lambda: ID)
    monkeypatch.setattr(nccl, "LOOK", 0.05)
    monkeypatch.setattr(torch.cuda, "Event", Done)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setenv(nccl.INTERFACE, "lo")
    yield
    Communicator.made.clear()


def on_ranks(folder: Path, work: Callable[[nccl.NcclComm], Any], size: int = 2, timeout: float = 60.0) -> list[Any]:
    def rank(number: int) -> Any:
        comm = nccl.NcclComm(NoOptions(), CommContext(number, size, folder, "comm", "cpu", timeout, 60.0))
        try:
            return work(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def test_a_group_that_did_its_work_is_taken_down_in_good_order(tmp_path: Path) -> None:
    def work(comm: nccl.NcclComm) -> int:
        comm.all_reduce(torch.ones(2))
        least = comm.min(7 + comm.context.rank)
        comm.wait(torch.cuda.Event())  # type: ignore[no-untyped-call]
        comm.close()
        comm.close()
        with pytest.raises(Closed, match="all_reduce: after close"):
            comm.all_reduce(torch.ones(2))
        return least

    assert on_ranks(tmp_path, work) == [7, 8]  # nothing is combined here
    assert "destroy" in Communicator.made[0].calls + Communicator.made[1].calls
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_has_gone_frees_those_who_wait_for_it(tmp_path: Path) -> None:
    left = Event()

    def work(comm: nccl.NcclComm) -> str:
        if comm.context.rank == 1:
            comm.close()
            left.set()
            return ""
        assert left.wait(60)
        with pytest.raises(PeerLost) as waited:
            comm.wait(Stuck(comm._nccl))  # type: ignore[arg-type]
        with pytest.raises(PeerLost, match="rank 0 of 2, all_reduce: rank 1 has gone"):
            comm.all_reduce(torch.ones(2))
        return str(waited.value)

    assert on_ranks(tmp_path, work)[0] == "rank 0 of 2, wait: rank 1 has gone"


def test_what_ends_well_after_a_rank_has_gone_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Event()

    def work(comm: nccl.NcclComm) -> None:
        if comm.context.rank == 1:
            comm.close()
            left.set()
            return
        assert left.wait(60)
        while comm._failure is None:
            time.sleep(0.001)
        comm.wait(Done())  # type: ignore[arg-type]
        comm._leaving.set()  # rather than sleep as long as the watcher

    monkeypatch.setattr(nccl, "LOOK", 0.5)
    on_ranks(tmp_path, work)


@pytest.mark.parametrize("where", ["wait", "all_reduce"])
def test_a_rank_that_stands_still_is_an_error_at_the_timeout(tmp_path: Path, where: str) -> None:
    given_up = Event()

    def work(comm: nccl.NcclComm) -> None:
        if comm.context.rank == 1:
            assert given_up.wait(60)
            return
        stuck: Any = Stuck(comm._nccl)  # type: ignore[arg-type]
        calls = {"wait": lambda: comm.wait(stuck), "all_reduce": lambda: comm.all_reduce(torch.ones(99))}
        with pytest.raises(DeadlineExceeded, match=f"rank 0 of 2, {where}: a rank is silent for 0.3 s"):
            calls[where]()
        given_up.set()

    on_ranks(tmp_path, work, timeout=0.3)


def test_a_group_that_nccl_refuses(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match=r"rank . of 3, joining with cpu: NCCL says: Duplicate GPU detected"):
        on_ranks(tmp_path, lambda comm: None, size=3)


def test_the_probe_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(probe, "no_cuda", lambda: "there is no CUDA device")
    assert probe.probe_nccl() == "there is no CUDA device"
    monkeypatch.setattr(probe, "no_cuda", lambda: None)
    monkeypatch.setattr("ctypes.CDLL", nothing)
    assert probe.probe_nccl() == "torch has brought no NCCL: libnccl.so.2: cannot open shared object file"
